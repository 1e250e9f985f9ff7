// Search over all pages, and contents that are closed where there is no room for them. Works from a file, too.
"use strict";
const UP = document.currentScript.dataset.up;
const box = document.querySelector("search"), field = box.querySelector("input"), list = box.querySelector("ol");
let waiting = null;

function load() {      // the words of all pages, once somebody wants them
  waiting ??= new Promise(done => {
    const script = document.createElement("script");
    script.src = UP + "search.js";
    script.onload = done;
    document.head.append(script);
  });
  return waiting;
}

function score(entry, words, phrase) {      // 0: not found; a name that is asked for stands before prose that mentions it
  const [where, page, heading, text] = entry.map(t => t.toLowerCase());
  const name = heading || page, all = `${page} ${heading} ${text}`;
  if (!words.every(w => all.includes(w))) return 0;
  const last = name.split(".").at(-1);
  return 1 + 50 * (name === phrase) + 30 * (last === phrase) + 20 * name.startsWith(phrase) + 10 * name.includes(phrase)
    + 5 * words.every(w => name.includes(w)) + 3 * words.every(w => page.includes(w)) + 2 * text.includes(phrase);
}

function extract(text, words) {      // what stands around the first word that is found
  const place = text.toLowerCase().indexOf(words.find(w => text.toLowerCase().includes(w)) ?? "");
  const at = place < 40 ? 0 : text.indexOf(" ", place - 40) + 1;
  return (at ? "… " : "") + text.slice(at, at + 120) + (at + 120 < text.length ? " …" : "");
}

function show() {
  const phrase = field.value.trim().toLowerCase(), words = phrase.split(/\s+/);
  const found = phrase.length < 2 ? [] : PAGES.map(e => [score(e, words, phrase), e]).filter(([s]) => s)
    .sort((a, b) => b[0] - a[0]).slice(0, 20);
  list.replaceChildren(...found.map(([, [where, page, heading, text]]) => {
    const item = document.createElement("li"), link = document.createElement("a"), said = document.createElement("small");
    link.href = UP + where;
    link.textContent = heading ? `${heading} · ${page}` : page;
    said.textContent = extract(text, words);
    link.append(said);
    item.append(link);
    return item;
  }));
  if (phrase.length >= 2 && !found.length) list.append(Object.assign(document.createElement("li"), {textContent: "Nothing found"}));
}

box.hidden = false;
field.addEventListener("focus", load);
field.addEventListener("input", () => load().then(show));
document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, textarea, select"), links = [...list.querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  if (event.key === "/" && !typing) { event.preventDefault(); field.focus(); }
  else if (event.key === "Escape") { field.value = ""; list.replaceChildren(); field.blur(); }
  else if (event.key === "Enter" && event.target === field && links.length) location.href = links[0].href;
  else if (links.length && (at >= 0 || event.target === field) && /^Arrow(Up|Down)$/.test(event.key)) {
    event.preventDefault();
    (links[at + (event.key === "ArrowDown" ? 1 : -1)] ?? field).focus();
  }
});
document.addEventListener("click", event => {
  if (!box.contains(event.target)) list.replaceChildren();
  else if (event.target === field && field.value) load().then(show);
});

const contents = document.querySelector("aside details");
if (contents && !matchMedia("(min-width: 75.01rem)").matches) contents.open = false;
function unfold() {      // a link into something folded opens it
  const at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = at?.closest?.("main details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
}
addEventListener("hashchange", unfold);
unfold();
