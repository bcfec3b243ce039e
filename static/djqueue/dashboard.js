/* Live updates, charts and keyboard shortcuts of the dashboard. Pages also work without this script. */
(() => {
  "use strict";
  const root = document.getElementById("djq");
  if (!root) return;
  const live = document.getElementById("djq-live");
  const words = root.dataset;
  const lang = document.documentElement.lang || "en";
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const stored = (key, value) => {
    try {
      if (value === undefined) return localStorage.getItem(`djq-${key}`);
      localStorage.setItem(`djq-${key}`, value);
    } catch (_) { /* localStorage is blocked: settings are not remembered */ }
    return null;
  };

  // Times.

  const relative = new Intl.RelativeTimeFormat(lang, { numeric: "auto", style: "short" });
  const UNITS = [["day", 172800, 86400], ["hour", 7200, 3600], ["minute", 120, 60], ["second", 0, 1]];
  let clockOffset = 0; // server clock minus local clock, in ms
  const now = () => Date.now() + clockOffset;
  const ago = (ms) => {
    const seconds = (ms - now()) / 1000;
    const [unit, , size] = UNITS.find(([, from]) => Math.abs(seconds) >= from);
    return relative.format(Math.round(seconds / size), unit);
  };
  const updateTimes = () => {
    for (const time of all("time[data-djq-ago]")) {
      const text = ago(Date.parse(time.dateTime));
      if (time.textContent !== text) time.textContent = text;
    }
  };

  // Live updates.

  const status = root.querySelector(".djq-status");
  const stamp = root.querySelector("[data-djq-stamp]");
  const every = root.querySelector("[data-djq-every]");
  const banner = document.getElementById("djq-banner");
  const announce = document.getElementById("djq-announce");
  let tag = live?.dataset.djqTag ?? "", timer = 0, busy = false, asOf = status ? Number(status.dataset.djqAsOf) : 0, bannerText = "", announced = false;
  let source = null, connected = false, lastPoll = 0, pending = 0, expectsChange = false; // the event stream that tells when to poll

  const seconds = () => (every ? Number(every.value) : 0);
  const isHeld = () => Boolean(live.querySelector("input[type=checkbox]:checked:not(.djq-more *), details[data-djq-hold][open]")) && !window.htmx?.registerExtension;
  const poll = () => {
    if (document.hidden) return true;
    if (busy || isHeld() || !window.htmx) return false;
    lastPoll = Date.now();
    window.htmx.trigger(live, "djqpoll");
    return true;
  };
  const schedulePoll = () => {
    clearTimeout(timer);
    if (!seconds() || document.hidden || connected) return;
    timer = setTimeout(() => { poll(); schedulePoll(); }, seconds() * 1000 * (0.9 + Math.random() * 0.2));
  };
  // While the event stream is connected there are no timed polls: its events poll, at most once per interval.
  const pollSoon = (after) => {
    if (pending) return;
    pending = setTimeout(() => { pending = 0; if (!poll()) pollSoon(1000); }, after);
  };
  const connect = () => {
    if (!words.djqStream || !window.EventSource || !live) return;
    if (document.hidden || !seconds()) { source?.close(); source = null; connected = false; return; }
    if (source) return;
    const mine = source = new EventSource(words.djqStream);
    mine.addEventListener("open", () => { connected = true; schedulePoll(); }); // the first event arrives immediately
    mine.addEventListener("changed", () => { expectsChange = true; pollSoon(Math.max(100, lastPoll + seconds() * 1000 - Date.now())); });
    mine.addEventListener("error", () => {
      if (mine !== source) return;
      connected = false;
      if (mine.readyState === EventSource.CLOSED) { source = null; setTimeout(connect, 54000 + Math.random() * 12000); }
      schedulePoll();
    });
  };
  const showAge = () => {
    if (!stamp || !asOf) return;
    if (connected && !bannerText) asOf = now(); // otherwise an event would have arrived
    stamp.textContent = ago(asOf);
    status.classList.toggle("djq-stale", now() - asOf > Math.max(15000, seconds() * 3000) && seconds() > 0);
  };
  const showBanner = (text) => {
    if (bannerText === text) return;
    bannerText = text;
    banner.hidden = !text;
    banner.textContent = text;
  };
  const handleResponse = (code, header) => {
    busy = false;
    if (code === 401) { showBanner(words.djqWordExpired); clearTimeout(timer); every.value = "0"; connect(); return; }
    if (code === 0 || code >= 400) { showBanner(words.djqWordStale); return; }
    showBanner(decodeURIComponent(header("Djq-Notice") || "") || (header("Djq-Unavailable") ? words.djqWordStale : ""));
    if (header("Djq-Unavailable")) return;
    if (code !== 304) expectsChange = false;
    else if (expectsChange) { expectsChange = false; pollSoon(1200); } // another process responded, which had read before the change
    if (header("HX-PTag")) tag = header("HX-PTag");
    const shown = Number(header("Djq-As-Of"));
    if (shown) asOf = shown;
    showAge();
  };
  if (status && live) {
    status.querySelector("[data-djq-choose]").hidden = false;
    const chosen = stored("every") ?? words.djqPoll;
    every.value = [...every.options].some((one) => one.value === chosen) ? chosen : String(Math.round(Number(words.djqPoll)) || 0);
    if (every.selectedIndex < 0) every.value = "5";
    every.addEventListener("change", () => { stored("every", every.value); connect(); schedulePoll(); });
    // Event names of htmx 4, and of htmx 2 in case the theme loads that version.
    const mine = (event) => event.target === live;
    let moreShown = []; // per list, whether a phone shows all rows: htmx 2 replaces the checkboxes
    live.addEventListener("htmx:config:request", (event) => {
      if (mine(event) && tag) event.detail.ctx.request.headers["HX-PTag"] = tag;
    });
    live.addEventListener("htmx:configRequest", (event) => {
      if (mine(event) && tag) event.detail.headers["HX-PTag"] = tag;
    });
    for (const name of ["htmx:before:request", "htmx:beforeRequest"]) {
      live.addEventListener(name, (event) => {
        if (!mine(event)) return;
        if (document.hidden) event.preventDefault(); else busy = true;
      });
    }
    live.addEventListener("htmx:after:request", (event) => {
      const answer = event.detail.ctx?.response;
      if (mine(event) && answer) handleResponse(answer.status, (name) => answer.headers.get(name));
    });
    live.addEventListener("htmx:afterRequest", (event) => {
      const xhr = event.detail.xhr;
      if (mine(event) && xhr) handleResponse(xhr.status, (name) => xhr.getResponseHeader(name));
    });
    live.addEventListener("htmx:beforeSwap", (event) => {
      if (mine(event) && event.detail.xhr?.status !== 200) event.detail.shouldSwap = false;
      moreShown = all(".djq-more input", live).map((box) => box.checked);
    });
    live.addEventListener("htmx:afterSwap", () => all(".djq-more input", live).forEach((box, index) => { box.checked = moreShown[index]; }));
    live.addEventListener("htmx:before:swap", (event) => { // overrides the theme's settings
      if (mine(event) && event.detail.ctx?.response?.status >= 400) event.preventDefault();
    });
    for (const name of ["htmx:error", "htmx:sendError", "htmx:timeout"]) {
      live.addEventListener(name, () => handleResponse(0, () => null));
    }
    for (const name of ["htmx:after:swap", "htmx:afterSwap"]) live.addEventListener(name, refresh);
    document.addEventListener("visibilitychange", () => { connect(); if (!document.hidden) poll(); schedulePoll(); });
    addEventListener("pagehide", () => { source?.close(); source = null; connected = false; });
    addEventListener("pageshow", () => { connect(); schedulePoll(); });
    setInterval(() => { if (!document.hidden) { updateTimes(); showAge(); } }, 1000);
    schedulePoll();
  }

  function refresh() {
    updateTimes();
    charts();
    const health = live.querySelector("[data-djq-announce]");
    if (health && announce && announce.textContent !== health.dataset.djqAnnounce && !announced) {
      announce.textContent = health.dataset.djqAnnounce;
      announced = true;
      setTimeout(() => { announced = false; }, 30000);
    }
  }

  // Charts: each draws the table next to it, in the time zone of the page.

  let timeZone = words.djqZone || undefined;
  try { new Intl.DateTimeFormat(lang, { timeZone }); } catch (_) { timeZone = undefined; /* unnamed zone: use the browser's */ }
  const COLOURS = ["--djq-accent", "--djq-good", "--djq-bad", "--djq-mark", "--djq-quiet"];
  const plots = new Map();
  const probe = root.appendChild(document.createElement("span")); // resolves tokens, for a canvas knows none
  probe.hidden = true;
  const colour = (name) => { probe.style.color = `var(${name}, #888)`; return getComputedStyle(probe).color; };
  // The figure's own table: uPlot's legend is a table, too.
  const tableOf = (figure) => figure.querySelector("table.djq-table");
  const cells = (figure) => {
    const table = tableOf(figure);
    const head = all("thead th", table);
    const columns = head.map(() => []);
    for (const row of all("tbody tr", table)) {
      [...row.children].forEach((cell, index) => {
        const value = cell.dataset.v;
        columns[index]?.push(value === undefined || value === "" ? null : Number(value));
      });
    }
    const stacked = head.map((cell) => "djqStack" in cell.dataset);
    stacked.forEach((is, index) => {
      if (is) columns[index] = columns[index].map((value, row) => value + columns[index - 1][row]);
    });
    return { names: head.map((cell) => cell.textContent.trim()), columns, stacked };
  };
  // Annotations: vertical lines with labels in up to three rows.
  const drawAnnotations = (figure) => (plot) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--djq-mark");
    ctx.lineWidth = ratio;
    ctx.font = `${11 * ratio}px sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    const ends = [];
    for (const annotation of all("[data-djq-annotation]", figure)) {
      // Annotations within the last step are drawn at the edge.
      const at = Math.round(plot.valToPos(Number(annotation.dataset.djqAnnotation), "x", true));
      const x = Math.max(bbox.left, Math.min(at, bbox.left + bbox.width - 1)) + 0.5;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const label = annotation.textContent.length > 24 ? `${annotation.textContent.slice(0, 23)}…` : annotation.textContent;
      const wide = ctx.measureText(label).width + 6 * ratio;
      const left = Math.max(bbox.left, Math.min(x + 3 * ratio, bbox.left + bbox.width - wide));
      const line = [0, 1, 2].find((one) => !(ends[one] > left));
      if (line === undefined) continue; // no room: the label is in the table only
      ends[line] = left + wide;
      ctx.fillText(label, left, bbox.top + line * 13 * ratio);
    }
    ctx.restore();
  };
  function charts() {
    if (!window.uPlot) return;
    for (const [container, plot] of plots) if (!container.isConnected) { plot.destroy(); plots.delete(container); }
    for (const figure of all("figure.djq-chart")) {
      const container = figure.querySelector(".djq-plot");
      if (!container || !container.clientWidth) continue;
      const { names, columns, stacked } = cells(figure);
      const plot = plots.get(container);
      if (!columns[0]?.length) { plot?.destroy(); plots.delete(container); continue; }
      if (plot && plot.series.length === names.length) { plot.setData(columns); continue; }
      plot?.destroy();
      plots.set(container, new window.uPlot(options(figure, names, stacked, container), columns, container));
    }
  }
  function options(figure, names, stacked, container) {
    const log = figure.dataset.djqScale === "log";
    const unit = figure.dataset.djqUnit || "";
    const short = new Intl.NumberFormat(lang, { notation: "compact", maximumFractionDigits: 1 });
    const isTime = figure.dataset.djqX !== "number";
    const clock = new Intl.DateTimeFormat(lang, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
    const day = new Intl.DateTimeFormat(lang, { day: "numeric", month: "short", timeZone });
    const both = new Intl.DateTimeFormat(lang, { dateStyle: "medium", timeStyle: "short", hourCycle: "h23", timeZone });
    const inZone = (at) => (timeZone ? window.uPlot.tzDate(new Date(at * 1000), timeZone) : new Date(at * 1000));
    const times = (_u, splits, _axis, _space, step) => splits.map((at, index) => {
      const when = new Date(at * 1000);
      if (step >= 86400) return day.format(when);
      const isFirst = index === 0 || (inZone(at).getHours() === 0 && inZone(at).getMinutes() === 0);
      return isFirst ? `${clock.format(when)}\n${day.format(when)}` : clock.format(when);
    });
    const first = (at) => tableOf(figure).querySelector(`tbody td:first-child[data-v="${at}"]`)?.textContent.trim() ?? "";
    const classes = (_u, splits) => splits.map((at) => first(at));
    const axis = { stroke: () => colour("--djq-quiet"), grid: { stroke: () => colour("--djq-line"), width: 1 }, ticks: { show: false } };
    const line = (index) => all("thead th", tableOf(figure))[index]?.dataset.djqLine;
    const OWN = { bound: "--djq-bad", bad: "--djq-bad", good: "--djq-good" };
    const fill = figure.dataset.djqKind === "bars" ? { paths: window.uPlot.paths.bars({ size: [0.8, 40] }) } : {};
    return {
      tzDate: inZone,
      width: container.clientWidth,
      height: 190,
      scales: { x: { time: isTime }, y: log ? { distr: 3 } : { range: (_u, low, high) => [Math.min(0, low ?? 0), high || 1] } },
      axes: [{ ...axis, space: 72, values: isTime ? times : classes }, { ...axis, size: 56, values: (_u, values) => values.map((one) => (one === null ? "" : short.format(one) + unit)) }],
      series: names.map((label, index) => (index ? {
        label,
        width: 2,
        fill: line(index) === "good" ? () => colour("--djq-good-area") : undefined,
        stroke: () => colour(OWN[line(index)] ?? COLOURS[(index - 1) % COLOURS.length]),
        dash: line(index) === "bound" ? [8, 4] : index > COLOURS.length ? [4, 4] : undefined,
        points: { show: "djqPoints" in figure.dataset, size: 5 },
        spanGaps: false,
        // A stacked series is drawn on top of the one before it, and named with its own number.
        value: (plot, value, _at, row) => (value === null ? "–" : short.format(stacked[index] ? value - (plot.data[index - 1][row] ?? 0) : value) + unit),
        ...fill,
      } : { label, value: (_u, at) => (at === null ? "–" : isTime ? both.format(new Date(at * 1000)) : first(at)) })),
      hooks: { draw: [drawAnnotations(figure)] },
      legend: { live: true },
      bands: names.flatMap((_name, index) => (stacked[index] ? [{ series: [index, index - 1], fill: () => colour("--djq-bad-area") }] : [])),
      cursor: { drag: { x: false, y: false }, ...(isTime ? { sync: { key: "djq" } } : {}) },
    };
  }
  const redraw = () => plots.forEach((plot) => plot.redraw(false));
  new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let sizing = 0;
  addEventListener("resize", () => {
    clearTimeout(sizing);
    sizing = setTimeout(() => plots.forEach((plot, container) => plot.setSize({ width: container.clientWidth, height: 190 })), 100);
  });

  // Forms are submitted once; checkboxes to select all rows; copy buttons.

  document.addEventListener("submit", (event) => {
    const button = event.submitter;
    if (button) setTimeout(() => { button.disabled = true; });
  });
  addEventListener("pageshow", () => all(".djq button:disabled[type=submit]").forEach((one) => { if (!("djqWhy" in one.dataset)) one.disabled = false; }));
  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches?.("[data-djq-all]")) all("[data-djq-one]").forEach((one) => { one.checked = box.checked; });
    if (box.matches?.("[data-djq-all], [data-djq-one]")) {
      const count = all("[data-djq-one]:checked").length;
      all("[data-djq-count]").forEach((container) => { container.textContent = String(count); });
      all("[data-djq-needs-one]").forEach((button) => { button.disabled = !count; });
    }
  });
  document.addEventListener("click", (event) => {
    const copied = event.target.closest?.("[data-djq-copy]");
    if (!copied || !navigator.clipboard) return;
    navigator.clipboard.writeText(copied.dataset.djqCopy).then(() => { announce.textContent = words.djqWordCopied; });
  });

  // Keyboard shortcuts.

  const help = document.getElementById("djq-help");
  const using = help.querySelector("[data-djq-keys]");
  using.checked = stored("keys") !== "off";
  using.addEventListener("change", () => stored("keys", using.checked ? "on" : "off"));
  let going = false;
  const step = (by) => {
    const rows = all("tr[data-djq-row] a[data-djq-open]");
    if (!rows.length) return;
    const at = rows.indexOf(document.activeElement);
    rows[Math.min(rows.length - 1, Math.max(0, at + by))].focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "?" && event.target.matches?.("body, a, button")) { help.showModal(); return; }
    if (!using.checked || help.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches?.("input, select, textarea, [contenteditable]")) return;
    const key = event.key;
    if (going) {
      going = false;
      all("a[data-djq-key]", root).find((link) => link.dataset.djqKey === key)?.click();
      return;
    }
    if (key === "g") { going = true; setTimeout(() => { going = false; }, 1500); }
    else if (key === "/") { const field = root.querySelector("[data-djq-filter]"); if (field) { event.preventDefault(); field.focus(); } }
    else if (key === "j") step(1);
    else if (key === "k") step(-1);
    else if (key === "x") document.activeElement.closest?.("tr[data-djq-row]")?.querySelector("[data-djq-one]")?.click();
    else if (key === "r") poll();
    else if (key === "p" && every) { every.value = seconds() ? "0" : (stored("every") || "5"); connect(); schedulePoll(); }
  });

  updateTimes();
  charts();
})();
