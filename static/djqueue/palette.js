/* The palette: Ctrl-K finds pages, queues, job types, jobs and actions. The server decides what a user may see. */
const link = document.querySelector("a[data-djq-palette]");
const dialog = document.getElementById("djq-palette");
const field = dialog?.querySelector("input");
const found = dialog?.querySelector("[data-djq-found]");
let timer = 0, wanted = 0, listed = null; // the text of which the entries are

const entries = () => [...found.querySelectorAll("a, button")];
const look = async () => {
  clearTimeout(timer);
  const mine = ++wanted, text = field.value;
  const address = new URL(link.href);
  address.searchParams.set("q", text);
  const answer = await fetch(address, { headers: { "HX-Request": "true" } }).catch(() => null);
  const html = answer?.status === 200 ? await answer.text().catch(() => null) : null;
  if (mine !== wanted) return;
  const { djqWordExpired, djqWordStale } = document.getElementById("djq").dataset;
  listed = html === null ? null : text;
  if (html !== null) found.innerHTML = html;
  else found.textContent = answer?.status === 401 ? djqWordExpired : djqWordStale;
};
const open = () => {
  if (dialog.open) return;
  field.value = "";
  listed = null;
  found.replaceChildren();
  dialog.showModal();
  look();
};
const follow = async () => {
  if (listed !== field.value) await look();
  // A button acts at once, so it must have the focus.
  const first = listed === field.value && entries()[0];
  if (!first || !dialog.open) return;
  if (first.matches("a")) first.click();
  else first.focus();
};
const step = (by) => {
  const all = entries();
  const at = all.indexOf(document.activeElement) + by;
  (at < 0 ? field : all[Math.min(at, all.length - 1)])?.focus();
};

if (link && dialog) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
      event.preventDefault();
      event.stopPropagation(); // some themes have a palette of their own
      open();
    }
  });
  field.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(look, 120); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") { event.preventDefault(); step(1); }
    else if (event.key === "ArrowUp") { event.preventDefault(); step(-1); }
    else if (event.key === "Enter" && event.target === field) { event.preventDefault(); follow(); }
  });
}
