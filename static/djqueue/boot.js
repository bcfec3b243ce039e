/* Loads htmx unless the site's theme has loaded one: two copies would send each request twice. */
(() => {
  const me = document.currentScript;
  const load = () => {
    if (window.htmx) return;
    const script = document.createElement("script");
    script.src = me.dataset.djqHtmx;
    if (me.nonce) script.nonce = me.nonce;
    document.head.append(script);
  };
  if (document.readyState === "complete") load();
  else document.addEventListener("DOMContentLoaded", load);
})();
