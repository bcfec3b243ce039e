/* The dashboard's pages while they are open: they work without this, and stay as they were loaded. */
(() => {
  "use strict";
  const desk = document.getElementById("djq");
  if (!desk) return;
  const live = document.getElementById("djq-live");
  const words = desk.dataset;
  const lang = document.documentElement.lang || "en";
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const kept = (key, value) => {
    try {
      if (value === undefined) return localStorage.getItem(`djq-${key}`);
      localStorage.setItem(`djq-${key}`, value);
    } catch (_) { /* storage is forbidden here: nothing is remembered */ }
    return null;
  };

  // Times.

  const relative = new Intl.RelativeTimeFormat(lang, { numeric: "auto", style: "short" });
  const UNITS = [["day", 172800, 86400], ["hour", 7200, 3600], ["minute", 120, 60], ["second", 0, 1]];
  let ahead = 0; // of the server's clock, in ms
  const now = () => Date.now() + ahead;
  const ago = (ms) => {
    const seconds = (ms - now()) / 1000;
    const [unit, , size] = UNITS.find(([, from]) => Math.abs(seconds) >= from);
    return relative.format(Math.round(seconds / size), unit);
  };
  const tick = () => {
    for (const time of all("time[data-djq-ago]")) {
      const text = ago(Date.parse(time.dateTime));
      if (time.textContent !== text) time.textContent = text;
    }
  };

  // Looking again.

  const status = desk.querySelector(".djq-status");
  const stamp = desk.querySelector("[data-djq-stamp]");
  const every = desk.querySelector("[data-djq-every]");
  const banner = document.getElementById("djq-banner");
  const announce = document.getElementById("djq-announce");
  let tag = live?.dataset.djqTag ?? "", timer = 0, busy = false, asOf = status ? Number(status.dataset.djqAsOf) : 0, failing = "", touched = false;
  let source = null, told = false, looked = 0, asked = 0, doubt = false; // of the stream that says when to look

  const seconds = () => (every ? Number(every.value) : 0);
  const held = () => Boolean(live.querySelector("input[type=checkbox]:checked, details[data-djq-hold][open]")) && !window.htmx?.registerExtension;
  const look = () => {
    if (document.hidden) return true;
    if (busy || held() || !window.htmx) return false;
    looked = Date.now();
    window.htmx.trigger(live, "djqpoll");
    return true;
  };
  const wind = () => {
    clearTimeout(timer);
    if (!seconds() || document.hidden || told) return;
    timer = setTimeout(() => { look(); wind(); }, seconds() * 1000 * (0.9 + Math.random() * 0.2));
  };
  // While a stream is open nothing is asked; what it tells is looked at as soon as the chosen time has passed.
  const soon = (after) => {
    if (asked) return;
    asked = setTimeout(() => { asked = 0; if (!look()) soon(1000); }, after);
  };
  const listen = () => {
    if (!words.djqStream || !window.EventSource || !live) return;
    if (document.hidden || !seconds()) { source?.close(); source = null; told = false; return; }
    if (source) return;
    const mine = source = new EventSource(words.djqStream);
    mine.addEventListener("open", () => { told = true; wind(); }); // the first word comes at once
    mine.addEventListener("changed", () => { doubt = true; soon(Math.max(100, looked + seconds() * 1000 - Date.now())); });
    mine.addEventListener("error", () => {
      if (mine !== source) return;
      told = false;
      if (mine.readyState === EventSource.CLOSED) { source = null; setTimeout(listen, 54000 + Math.random() * 12000); }
      wind();
    });
  };
  const age = () => {
    if (!stamp || !asOf) return;
    if (told && !failing) asOf = now(); // else it would have been told
    stamp.textContent = ago(asOf);
    status.classList.toggle("djq-old", now() - asOf > Math.max(15000, seconds() * 3000) && seconds() > 0);
  };
  const say = (text) => {
    if (failing === text) return;
    failing = text;
    banner.hidden = !text;
    banner.textContent = text;
  };
  const heard = (code, header) => {
    busy = false;
    if (code === 401) { say(words.djqWordOver); clearTimeout(timer); every.value = "0"; listen(); return; }
    if (code === 0 || code >= 400) { say(words.djqWordOld); return; }
    say(decodeURIComponent(header("Djq-Notice") || "") || (header("Djq-Away") ? words.djqWordOld : ""));
    if (header("Djq-Away")) return;
    if (code !== 304) doubt = false;
    else if (doubt) { doubt = false; soon(1200); } // another process, which looked a moment before
    if (header("HX-PTag")) tag = header("HX-PTag");
    const shown = Number(header("Djq-As-Of"));
    if (shown) asOf = shown;
    age();
  };
  if (status && live) {
    status.querySelector("[data-djq-choose]").hidden = false;
    const chosen = kept("every") ?? words.djqPoll;
    every.value = [...every.options].some((one) => one.value === chosen) ? chosen : String(Math.round(Number(words.djqPoll)) || 0);
    if (every.selectedIndex < 0) every.value = "5";
    every.addEventListener("change", () => { kept("every", every.value); listen(); wind(); });
    // htmx 4, and the names that 2 has, should the theme have brought that.
    const mine = (event) => event.target === live;
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
      if (mine(event) && answer) heard(answer.status, (name) => answer.headers.get(name));
    });
    live.addEventListener("htmx:afterRequest", (event) => {
      const xhr = event.detail.xhr;
      if (mine(event) && xhr) heard(xhr.status, (name) => xhr.getResponseHeader(name));
    });
    live.addEventListener("htmx:beforeSwap", (event) => {
      if (mine(event) && event.detail.xhr?.status !== 200) event.detail.shouldSwap = false;
    });
    live.addEventListener("htmx:before:swap", (event) => { // whatever the theme has set
      if (mine(event) && event.detail.ctx?.response?.status >= 400) event.preventDefault();
    });
    for (const name of ["htmx:error", "htmx:sendError", "htmx:timeout"]) {
      live.addEventListener(name, () => heard(0, () => null));
    }
    for (const name of ["htmx:after:swap", "htmx:afterSwap"]) live.addEventListener(name, refresh);
    document.addEventListener("visibilitychange", () => { listen(); if (!document.hidden) look(); wind(); });
    addEventListener("pagehide", () => { source?.close(); source = null; told = false; });
    addEventListener("pageshow", () => { listen(); wind(); });
    setInterval(() => { if (!document.hidden) { tick(); age(); } }, 1000);
    wind();
  }

  function refresh() {
    tick();
    charts();
    const told = live.querySelector("[data-djq-announce]");
    if (told && announce && announce.textContent !== told.dataset.djqAnnounce && !touched) {
      announce.textContent = told.dataset.djqAnnounce;
      touched = true;
      setTimeout(() => { touched = false; }, 30000);
    }
  }

  // Charts: each draws the table that is beside it, with the clock of the page's own times.

  let timeZone = words.djqZone || undefined;
  try { new Intl.DateTimeFormat(lang, { timeZone }); } catch (_) { timeZone = undefined; /* a zone without a name: the browser's */ }
  const COLOURS = ["--link-fg", "--djq-good", "--error-fg", "--djq-fourth", "--body-quiet-color"];
  const drawn = new Map();
  const colour = (name) => getComputedStyle(desk).getPropertyValue(name).trim() || "#888";
  const cells = (figure) => {
    const head = all("thead th", figure);
    const columns = head.map(() => []);
    for (const row of all("tbody tr", figure)) {
      [...row.children].forEach((cell, index) => {
        const value = cell.dataset.v;
        columns[index]?.push(value === undefined || value === "" ? null : Number(value));
      });
    }
    return { names: head.map((cell) => cell.textContent.trim()), columns };
  };
  // What happened meanwhile, as vertical lines with a label each, next to one another where there is room.
  const flags = (figure) => (plot) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--djq-fourth");
    ctx.lineWidth = ratio;
    ctx.font = `${11 * ratio}px sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    const ends = [];
    for (const mark of all("[data-djq-mark]", figure)) {
      // What happened since the last step began is at the edge.
      const at = Math.round(plot.valToPos(Number(mark.dataset.djqMark), "x", true));
      const x = Math.max(bbox.left, Math.min(at, bbox.left + bbox.width - 1)) + 0.5;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const label = mark.textContent.length > 24 ? `${mark.textContent.slice(0, 23)}…` : mark.textContent;
      const wide = ctx.measureText(label).width + 6 * ratio;
      const left = Math.max(bbox.left, Math.min(x + 3 * ratio, bbox.left + bbox.width - wide));
      const line = [0, 1, 2].find((one) => !(ends[one] > left));
      if (line === undefined) continue; // its line is there, and its label in the table
      ends[line] = left + wide;
      ctx.fillText(label, left, bbox.top + line * 13 * ratio);
    }
    ctx.restore();
  };
  function charts() {
    if (!window.uPlot) return;
    for (const [place, plot] of drawn) if (!place.isConnected) { plot.destroy(); drawn.delete(place); }
    for (const figure of all("figure.djq-chart")) {
      const place = figure.querySelector(".djq-plot");
      if (!place || !place.clientWidth) continue;
      const { names, columns } = cells(figure);
      const plot = drawn.get(place);
      if (!columns[0]?.length) { plot?.destroy(); drawn.delete(place); continue; }
      if (plot && plot.series.length === names.length) { plot.setData(columns); continue; }
      plot?.destroy();
      drawn.set(place, new window.uPlot(options(figure, names, place), columns, place));
    }
  }
  function options(figure, names, place) {
    const log = figure.dataset.djqScale === "log";
    const unit = figure.dataset.djqUnit || "";
    const short = new Intl.NumberFormat(lang, { notation: "compact", maximumFractionDigits: 1 });
    const isTime = figure.dataset.djqX !== "number";
    const clock = new Intl.DateTimeFormat(lang, { hour: "2-digit", minute: "2-digit", timeZone });
    const day = new Intl.DateTimeFormat(lang, { day: "numeric", month: "short", timeZone });
    const both = new Intl.DateTimeFormat(lang, { dateStyle: "medium", timeStyle: "short", timeZone });
    const there = (at) => (timeZone ? window.uPlot.tzDate(new Date(at * 1000), timeZone) : new Date(at * 1000));
    const times = (_u, splits, _axis, _space, step) => splits.map((at, index) => {
      const when = new Date(at * 1000);
      if (step >= 86400) return day.format(when);
      const isFirst = index === 0 || (there(at).getHours() === 0 && there(at).getMinutes() === 0);
      return isFirst ? `${clock.format(when)}\n${day.format(when)}` : clock.format(when);
    });
    const first = (at) => figure.querySelector(`tbody td:first-child[data-v="${at}"]`)?.textContent.trim() ?? "";
    const classes = (_u, splits) => splits.map((at) => first(at));
    const axis = { stroke: () => colour("--body-quiet-color"), grid: { stroke: () => colour("--hairline-color"), width: 1 }, ticks: { show: false } };
    const bounds = all("thead th", figure).map((cell) => cell.dataset.djqLine === "bound");
    const fill = figure.dataset.djqKind === "bars" ? { paths: window.uPlot.paths.bars({ size: [0.8, 40] }) } : {};
    return {
      tzDate: there,
      width: place.clientWidth,
      height: 190,
      scales: { x: { time: isTime }, y: log ? { distr: 3 } : { range: (_u, low, high) => [Math.min(0, low ?? 0), high || 1] } },
      axes: [{ ...axis, space: 72, values: isTime ? times : classes }, { ...axis, size: 56, values: (_u, values) => values.map((one) => (one === null ? "" : short.format(one) + unit)) }],
      series: names.map((label, index) => (index ? {
        label,
        width: 2,
        stroke: () => colour(bounds[index] ? "--djq-bad" : COLOURS[(index - 1) % COLOURS.length]),
        dash: bounds[index] ? [8, 4] : index > COLOURS.length ? [4, 4] : undefined,
        points: { show: "djqPoints" in figure.dataset, size: 5 },
        spanGaps: false,
        value: (_u, value) => (value === null ? "–" : short.format(value) + unit),
        ...fill,
      } : { label, value: (_u, at) => (at === null ? "–" : isTime ? both.format(new Date(at * 1000)) : first(at)) })),
      hooks: { draw: [flags(figure)] },
      legend: { live: true },
      cursor: { drag: { x: false, y: false } },
    };
  }
  const redraw = () => drawn.forEach((plot) => plot.redraw(false));
  new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let sizing = 0;
  addEventListener("resize", () => {
    clearTimeout(sizing);
    sizing = setTimeout(() => drawn.forEach((plot, place) => plot.setSize({ width: place.clientWidth, height: 190 })), 100);
  });

  // Forms: sent once; lists whose boxes are ticked together; copies.

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
      all("[data-djq-count]").forEach((place) => { place.textContent = String(count); });
      all("[data-djq-needs-one]").forEach((button) => { button.disabled = !count; });
    }
  });
  document.addEventListener("click", (event) => {
    const copied = event.target.closest?.("[data-djq-copy]");
    if (!copied || !navigator.clipboard) return;
    navigator.clipboard.writeText(copied.dataset.djqCopy).then(() => { announce.textContent = words.djqWordCopied; });
  });

  // Keys.

  const help = document.getElementById("djq-help");
  const using = help.querySelector("[data-djq-keys]");
  using.checked = kept("keys") !== "off";
  using.addEventListener("change", () => kept("keys", using.checked ? "on" : "off"));
  const PAGES = { o: "changelist", q: "queues", j: "jobs", d: "letters", c: "cron", w: "workers" };
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
      const link = PAGES[key] && desk.querySelector(`a[data-djq-page="${PAGES[key]}"]`);
      if (link) link.click();
      return;
    }
    if (key === "g") { going = true; setTimeout(() => { going = false; }, 1500); }
    else if (key === "/") { const field = desk.querySelector("[data-djq-filter]"); if (field) { event.preventDefault(); field.focus(); } }
    else if (key === "j") step(1);
    else if (key === "k") step(-1);
    else if (key === "x") document.activeElement.closest?.("tr[data-djq-row]")?.querySelector("[data-djq-one]")?.click();
    else if (key === "r") look();
    else if (key === "p" && every) { every.value = seconds() ? "0" : (kept("every") || "5"); listen(); wind(); }
  });

  tick();
  charts();
})();
