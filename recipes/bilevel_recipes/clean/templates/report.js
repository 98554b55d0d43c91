"use strict";
(() => {
  const PAGE = 48, MATRIX = 16, PAIRS = 40, OPTIONS = 200, CELLS = 8;
  const HEADER = ["row", "name", "given_label", "decision", "label"];
  const $ = (id) => document.getElementById(id);
  const D = JSON.parse($("data").textContent);
  const N = D.row.length;
  const KEY = "bilevel-clean:" + D.key;

  /* Elements are made with textContent alone: nothing in the data can become markup. */
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "onclick") element.onclick = value;
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((c) => c !== null));
    return element;
  }
  const bdi = (text, name = null) => make("bdi", { class: name, title: text }, text);
  const hidden = (text) => make("span", { class: "hidden" }, text);
  const count = (n) => n.toLocaleString("en");
  const label = (c) => D.classes[c];

  /* ---- decisions: row -> [name, given label, decision, label]; kept in the browser, by the data's fingerprint ---- */

  let decisions = new Map();
  let past = [];
  let storage = true, unsaved = false, timer = 0;

  function load() {
    let kept = null;
    try {
      kept = JSON.parse(localStorage.getItem(KEY) || "null");
      localStorage.setItem(KEY + ":test", "1");
      localStorage.removeItem(KEY + ":test");
    } catch (error) {
      storage = false;
    }
    decisions = new Map(kept ? kept.decisions : []);
    /* A file of decisions that was passed to this run is newer than what the browser kept from the run before. */
    if (!kept || kept.seed !== D.seed) for (const [row, ...rest] of D.earlier) decisions.set(row, rest);
  }
  function save() {
    clearTimeout(timer);
    timer = 0;
    if (!storage) return;
    try {
      localStorage.setItem(KEY, JSON.stringify({ seed: D.seed, decisions: [...decisions] }));
    } catch (error) {
      storage = false;
      note();
    }
  }
  function saveSoon() {
    unsaved = true;
    if (!timer) timer = setTimeout(save, 150);
  }
  function note() {
    $("kept").classList.toggle("lost", !storage);
    $("kept").textContent = storage
      ? "Decisions are kept in this browser, for these data."
      : "This browser does not keep decisions for this page: export them before you close it.";
  }
  function change(changes, message) {
    past.push(changes.map(([row]) => [row, decisions.get(row)]));
    put(changes);
    if (message) toast(message, true);
  }
  function put(changes) {
    for (const [row, decision] of changes) {
      if (decision) decisions.set(row, decision);
      else decisions.delete(row);
    }
    saveSoon();
    refresh();
  }
  function undoLast() {
    const last = past.pop();
    if (!last) return;
    put(last);
    toast(last.length === 1 ? "One decision was undone." : count(last.length) + " decisions were undone.");
  }
  const of = (i) => decisions.get(D.row[i]);
  const entry = (i, decision, c) => [D.row[i], [D.name[i], label(D.given[i]), decision, c === null ? "" : label(c)]];
  const accepted = (i) => entry(i, "relabel", D.suggested[i]);
  function decide(i, action) {
    if (action === "accept" && D.suggested[i] >= 0) change([accepted(i)]);
    else if (action === "keep") change([entry(i, "keep", D.given[i])]);
    else if (action === "drop") change([entry(i, "drop", null)]);
    else if (action === "unsure") change([entry(i, "unsure", D.given[i])]);
    else if (action === "undo" && of(i)) change([[D.row[i], null]]);
    else return false;
    return true;
  }
  function stateOf(i) {
    const d = of(i);
    if (!d) return null;
    if (d[2] === "new") return "other";
    if (d[2] !== "relabel") return d[2];
    return D.suggested[i] >= 0 && d[3] === label(D.suggested[i]) ? "accept" : "other";
  }

  /* ---- what is shown: all of it is in the address, so that reload and Back work ---- */

  const VIEWS = { suspects: "Suspects", rest: "Next most doubtful", sample: "Random sample", doubted: "Checked, but doubtful", earlier: "Decided before this run" };
  const SORTS = { "": "most suspicious first", surest: "surest suggestion first", pair: "by given and suggested label", name: "by name" };
  const DEFAULTS = { view: "suspects", given: "", suggested: "", q: "", undecided: "", sort: "", page: "1" };
  const chance = (i) => { const found = D.others[i].find(([c]) => c === D.suggested[i]); return found ? found[1] : null; };
  const ORDERS = {
    surest: (a, b) => (chance(b) || 0) - (chance(a) || 0),
    pair: (a, b) => D.given[a] - D.given[b] || D.suggested[a] - D.suggested[b],
    name: (a, b) => D.name[a].localeCompare(D.name[b], "en", { numeric: true }),
  };
  let state = { ...DEFAULTS }, listed = [], filter = null, shown = [], current = 0;

  function readAddress() {
    const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    state = { ...DEFAULTS };
    for (const name of Object.keys(DEFAULTS)) if (typeof found[name] === "string") state[name] = found[name];
    if (!D.groups[state.view]) state.view = "suspects";
    for (const name of ["given", "suggested"]) if (!(/^\d+$/.test(state[name]) && +state[name] < D.classes.length)) state[name] = "";
  }
  function go(changes) {
    const next = { ...state, page: "1", ...changes };
    const words = new URLSearchParams(Object.entries(next).filter(([name, value]) => value !== DEFAULTS[name]));
    const hash = "#" + words;
    if (location.hash === hash || (hash === "#" && !location.hash)) show();
    else location.hash = hash;
  }
  function inView() {
    const [start, end] = D.groups[state.view];
    return Array.from({ length: end - start }, (_, k) => start + k);
  }
  /* The list stays as it is while rows are decided and pages turned; else "undecided only" would skip rows. */
  function select() {
    const key = JSON.stringify({ ...state, page: "" });
    if (key === filter) return;
    filter = key;
    const given = state.given === "" ? null : +state.given, suggested = state.suggested === "" ? null : +state.suggested;
    const q = state.q.toLowerCase();
    listed = inView().filter((i) => (given === null || D.given[i] === given)
      && (suggested === null || D.suggested[i] === suggested)
      && (!q || D.name[i].toLowerCase().includes(q)) && !(state.undecided && of(i)));
    if (ORDERS[state.sort]) listed.sort(ORDERS[state.sort]);
  }
  const pages = () => Math.max(1, Math.ceil(listed.length / PAGE));
  const page = () => Math.min(pages(), Math.max(1, parseInt(state.page, 10) || 1));

  function show() {
    readAddress();
    select();
    const start = (page() - 1) * PAGE;
    shown = listed.slice(start, start + PAGE);
    current = 0;
    const cards = shown.map(card);
    $("cards").replaceChildren(...(cards.length ? cards : [nothing()]));
    controls();
    pagers();
    pairs();
    refresh();
  }
  function nothing() {
    const filtered = Object.keys(DEFAULTS).some((k) => k !== "view" && k !== "page" && k !== "sort" && state[k]);
    const words = filtered ? "No row matches the filter." : state.view === "suspects" ? "No label is suspected to be wrong." : "Nothing to show.";
    return make("p", { class: "empty" }, words);
  }

  /* ---- cards ---- */

  function content(i, whole) {
    if (D.content[i] === null) return make("p", { class: "missing" }, D.score[i] === null ? "Dropped before this run." : "There is no picture of this row.");
    if (D.kind === "images") {
      const picture = make("img", { alt: whole ? D.name[i] : "", src: D.content[i], loading: "lazy", decoding: "async" });
      picture.classList.toggle("pixelated", D.pixelated);
      return picture;
    }
    if (D.kind === "text") return make(whole ? "p" : "span", { class: "full", dir: "auto" }, D.content[i]);
    const cells = whole ? D.columns : D.columns.slice(0, CELLS);
    const more = D.columns.length - cells.length;
    const lines = cells.map((name, k) => make("tr", {}, make("th", { scope: "row" }, bdi(name)), make("td", {}, bdi(D.content[i][k]))));
    const table = make("table", { class: "cells" }, make("tbody", {}, ...lines));
    return more > 0 ? make("div", {}, table, make("button", { type: "button", class: "more", onclick: () => enlarge() }, "All " + count(D.columns.length) + " columns")) : table;
  }
  function labels(i) {
    const given = [hidden("given label "), bdi(label(D.given[i]), "given")];
    if (D.suggested[i] < 0) return make("div", { class: "labels" }, ...given);
    return make("div", { class: "labels" }, ...given, make("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      hidden(" suggested label "), bdi(label(D.suggested[i]), "suggested"),
      chance(i) === null ? null : make("span", { class: "chance", title: "probability of the suggested label" }, Math.round(100 * chance(i)) + " %"));
  }
  /* what the nearest rows are labelled, and rows of the same content */
  function near(i) {
    if (!D.near[i].length) return null;
    const counts = new Map();
    for (const [c] of D.near[i]) counts.set(c, (counts.get(c) || 0) + 1);
    const parts = [...counts].sort((a, b) => b[1] - a[1]).flatMap(([c, n], k) => [k ? ", " : "", n + " ", bdi(label(c))]);
    return make("p", { class: "near" }, "Nearest: ", ...parts);
  }
  function twins(i) {
    if (!D.twins[i].length) return null;
    return make("p", { class: "near" }, "Same content: ", ...D.twins[i].flatMap(([c, name], k) => [k ? ", " : "", bdi(name), " (", bdi(label(c)), ")"]));
  }
  function shownSmall(k, c, words) {
    const inside = D.kind === "images" ? make("img", { src: D.gallery[k], alt: "", loading: "lazy" })
      : make("span", { class: "excerpt", dir: "auto" }, String(D.gallery[k]).slice(0, 160));
    if (D.kind === "images") inside.classList.toggle("pixelated", D.pixelated);
    return make("figure", {}, inside, make("figcaption", {}, bdi(label(c)), words ? make("span", { class: "muted" }, " " + words) : null));
  }
  /* the rows beside an enlarged one: a typical row of either class, and the nearest rows */
  function evidence(i) {
    if (D.kind !== "images" && D.kind !== "text") return null;
    const typical = [D.given[i], D.suggested[i]].filter((c) => c >= 0 && D.typical[c] >= 0 && D.gallery[D.typical[c]] !== null);
    const nearest = D.near[i].filter(([, k]) => k >= 0 && D.gallery[k] !== null);
    if (!typical.length && !nearest.length) return null;
    return make("div", { class: "evidence" }, ...typical.map((c) => shownSmall(D.typical[c], c, "typical")),
      ...nearest.map(([c, k]) => shownSmall(k, c, "near")));
  }
  function body(i) {
    const score = D.score[i] === null ? null
      : make("span", { class: "score", title: "score: probability that the given label is right" }, D.score[i] < 0.0005 ? "<0.001" : D.score[i].toFixed(3));
    const undo = make("button", { type: "button", class: "undo", "aria-label": "Undo the decision on row " + D.name[i],
      onclick: () => { decide(i, "undo"); focusCard(current); } }, "Undo");
    return make("div", { class: "body" }, labels(i), make("div", { class: "line" }, bdi(D.name[i], "name"), score, undo), near(i), twins(i), actions(i));
  }
  function actions(i) {
    const button = (action, text, title) => make("button", { type: "button", "data-action": action, title,
      "aria-label": title + ", row " + D.name[i], onclick: () => act(i, action) }, text);
    const given = label(D.given[i]);
    return make("div", { class: "actions" },
      D.suggested[i] < 0 ? null : button("accept", "Accept", "Relabel as " + label(D.suggested[i])),
      button("keep", "Keep", "Keep the label " + given),
      button("other", "Other…", "Choose the label"),
      button("drop", "Drop", "Drop the row"),
      button("unsure", "Unsure", "Not sure: leave it undecided"));
  }
  function card(i, k) {
    const show = content(i), attributes = { type: "button", class: "content", title: "Enlarge (E)", onclick: () => enlarge(k) };
    if (D.kind === "images") attributes["aria-label"] = "Enlarge " + D.name[i];
    const opens = D.content[i] !== null && (D.kind === "images" || D.kind === "text");
    const inside = opens ? make("button", attributes, show) : make("div", { class: "content" }, show);
    const element = make("article", { class: "card", tabindex: k === 0 ? "0" : "-1", "data-k": k,
      "aria-label": "Row " + D.name[i] + ", given " + label(D.given[i]) },
      inside, body(i));
    element.addEventListener("focusin", () => { current = k; });
    return element;
  }
  function act(i, action) {
    if (action === "other") return choose(i);
    /* a second click on the decision takes it back */
    return decide(i, stateOf(i) === action ? "undo" : action);
  }
  function paint(element, i) {
    const found = stateOf(i);
    if (found) element.dataset.state = found;
    else delete element.dataset.state;
    for (const button of element.querySelectorAll("[data-action]")) {
      const action = button.dataset.action;
      button.setAttribute("aria-pressed", String(action === found));
      if (action === "other") button.textContent = found === "other" ? "→ " + of(i)[3] : "Other…";
    }
  }
  function refresh() {
    shown.forEach((i, k) => paint($("cards").children[k], i));
    if ($("zoom").open) paint($("zoom"), shown[current]);
    const [start, end] = D.groups.suspects;
    let done = 0;
    for (let i = start; i < end; i++) if (of(i)) done++;
    const others = decisions.size - done;
    $("count").textContent = count(done) + " of " + count(end - start) + " decided" + (others ? " (and " + count(others) + " other rows)" : "");
    $("done").value = end > start ? done / (end - start) : 1;
    $("undo").disabled = !past.length;
    bulk();
  }

  /* ---- many rows at once ---- */

  const open = (rows) => rows.filter((i) => !of(i) && D.suggested[i] >= 0);
  function bulk() {
    const here = open(shown).length, button = $("accept-page");
    button.textContent = "Accept all on this page (" + count(here) + ")";
    button.disabled = !here;
    const pair = state.given !== "" && state.suggested !== "";
    $("accept-pair").hidden = !pair;
    if (!pair) return;
    const all = open(listed).length;
    $("accept-pair").textContent = "Accept all " + label(state.given) + " → " + label(state.suggested) + " (" + count(all) + ")";
    $("accept-pair").disabled = !all;
  }
  function acceptAll(rows) {
    const changes = open(rows).map(accepted);
    if (changes.length) change(changes, changes.length === 1 ? "One suggestion was accepted." : count(changes.length) + " suggestions were accepted.");
  }
  let toastTimer = 0;
  function toast(text, undo) {
    clearTimeout(toastTimer);
    const button = undo ? make("button", { type: "button", onclick: () => { undoLast(); } }, "Undo") : null;
    $("toast").replaceChildren(...[make("span", {}, text), button].filter(Boolean));
    toastTimer = setTimeout(() => $("toast").replaceChildren(), Math.max(5000, 60 * text.length));
  }

  /* ---- filters ---- */

  function controls() {
    $("views").querySelectorAll("input").forEach((input) => { input.checked = input.value === state.view; });
    for (const name of ["given", "suggested", "sort"]) $(name).value = state[name];
    if (document.activeElement !== $("q")) $("q").value = state.q;
    $("undecided").checked = Boolean(state.undecided);
    const active = ["given", "suggested", "q", "undecided"].filter((name) => state[name]).length;
    $("active").textContent = active ? active + " active" : "";
    $("clear").hidden = !active;
    const what = { suspects: "suspect", rest: "other row", sample: "random row", doubted: "checked row", earlier: "earlier decision" }[state.view];
    $("listed").replaceChildren(count(listed.length) + " " + what + (listed.length === 1 ? "" : "s"),
      make("span", {}, state.view === "earlier" ? "" : state.view === "sample" ? "decide these in their order, as far as you like: they show how many labels are wrong"
        : SORTS[state.sort] + "; the number is the probability that the given label is right"));
  }
  function pagers() {
    const last = pages(), now = page();
    for (const nav of document.querySelectorAll(".pager")) {
      const turn = (to, text, name) => make("button", { type: "button", "aria-label": name, disabled: to < 1 || to > last, onclick: () => turnTo(to) }, text);
      nav.hidden = last === 1;
      nav.replaceChildren(turn(now - 1, "‹", "Previous page"), make("span", {}, "Page " + count(now) + " of " + count(last)), turn(now + 1, "›", "Next page"));
    }
  }
  function turnTo(to) {
    if (to < 1 || to > pages()) return;
    afterShow = () => { $("listed").scrollIntoView({ block: "center" }); focusCard(0); };
    go({ page: String(to) });
  }
  let afterShow = null;

  function pairs() {
    const counts = new Map();
    for (const i of inView()) {
      if (D.suggested[i] < 0) continue;
      const key = D.given[i] + " " + D.suggested[i];
      counts.set(key, (counts.get(key) || 0) + 1);
    }
    const found = [...counts].map(([key, n]) => [...key.split(" "), n]).sort((a, b) => b[2] - a[2]);
    if (!found.length) return $("pairs").replaceChildren();
    return $("pairs").replaceChildren(...(D.classes.length <= MATRIX ? matrix(counts, found[0][2]) : pairList(found)));
  }
  function pairButton(g, s, n, ...inside) {
    const on = state.given === String(g) && state.suggested === String(s);
    return make("button", { type: "button", "aria-pressed": String(on), "aria-label": label(g) + " to " + label(s) + ": " + count(n),
      title: label(g) + " → " + label(s), onclick: () => go(on ? { given: "", suggested: "" } : { given: String(g), suggested: String(s) }) }, ...inside);
  }
  function matrix(counts, top) {
    const head = make("tr", {}, make("td", { class: "corner" }), ...D.classes.map((c) => make("th", { scope: "col", class: "turned" }, bdi(c))));
    const lines = D.classes.map((c, g) => make("tr", {}, make("th", { scope: "row" }, bdi(c)), ...D.classes.map((_, s) => {
      const n = counts.get(g + " " + s);
      if (!n) return make("td", {});
      return make("td", { style: "--heat: " + Math.round(15 + 85 * n / top) + "%" }, pairButton(g, s, n, String(n)));
    })));
    return [make("h3", {}, "Given label (line) → suggested label (column)"),
      make("div", { class: "scroll" }, make("table", { class: "matrix" }, make("thead", {}, head), make("tbody", {}, ...lines)))];
  }
  function pairList(found) {
    const lines = found.slice(0, PAIRS).map(([g, s, n]) => make("li", {}, pairButton(g, s, n,
      make("span", {}, bdi(label(g)), " → ", bdi(label(s))), make("span", { class: "number" }, count(n)))));
    const title = found.length > PAIRS ? "The " + PAIRS + " most frequent of " + count(found.length) + " pairs" : "Given → suggested; click a pair";
    return [make("h3", {}, title), make("ul", { class: "pair-list" }, ...lines)];
  }

  /* ---- one row enlarged, and the choice of any class ---- */

  function enlarge(k = current) {
    current = k;
    const i = shown[current], zoom = $("zoom");
    if (i === undefined) return;
    const move = (by) => () => { step(by); };
    const foot = make("div", { class: "foot" },
      make("button", { type: "button", onclick: move(-1) }, "‹ Previous"), make("button", { type: "button", onclick: move(1) }, "Next ›"),
      make("button", { type: "button", onclick: () => zoom.close() }, "Close"));
    zoom.replaceChildren(...[content(i, true), evidence(i), body(i), foot].filter(Boolean));
    if (!zoom.open) {
      /* else the browser would give the focus back to the card that was enlarged first, not to the last one */
      document.activeElement.blur();
      zoom.showModal();
    }
    zoom.focus();
    paint(zoom, i);
  }
  function choose(i) {
    const dialog = $("choose");
    const likely = D.others[i].map(([c]) => c);
    const order = [...likely, ...D.classes.keys()].filter((c, k, all) => all.indexOf(c) === k);
    const chance = new Map(D.others[i]);
    const pick = (c) => {
      dialog.close();
      change([c === D.given[i] ? entry(i, "keep", c) : entry(i, "relabel", c)]);
    };
    const options = () => {
      const q = $("wanted").value.toLowerCase();
      const fit = order.filter((c) => label(c).toLowerCase().includes(q));
      const lines = fit.slice(0, OPTIONS).map((c) => make("li", {}, make("button", { type: "button", onclick: () => pick(c) }, bdi(label(c)),
        make("span", { class: "number" }, c === D.given[i] ? "given" : chance.has(c) ? Math.round(100 * chance.get(c)) + " %" : ""))));
      if (fit.length > OPTIONS) lines.push(make("li", { class: "muted" }, "and " + count(fit.length - OPTIONS) + " more: search for them"));
      const name = $("wanted").value.trim(), fresh = name && !D.classes.some((c) => c.toLowerCase() === name.toLowerCase());
      $("new-class").hidden = !fresh;
      $("new-class").textContent = "New class: " + name;
      $("new-class").onclick = () => { dialog.close(); change([[D.row[i], [D.name[i], label(D.given[i]), "new", name]]]); };
      $("options").replaceChildren(...(lines.length ? lines : [make("li", { class: "muted" }, "No class has this in its name.")]));
      return fit;
    };
    $("wanted").value = "";
    $("wanted").oninput = options;
    dialog.onkeydown = (event) => {
      const all = [...$("options").querySelectorAll("button")], at = all.indexOf(document.activeElement);
      if (event.key === "Enter" && at < 0 && all.length && event.target === $("wanted")) { event.preventDefault(); all[0].click(); }
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (by) { event.preventDefault(); (all[at + by] || $("wanted")).focus(); }
    };
    options();
    dialog.showModal();
    $("wanted").focus();
  }

  /* ---- keyboard ---- */

  function focusCard(k) {
    const cards = $("cards").children;
    if (!shown.length) return;
    for (const c of cards) c.tabIndex = -1;
    current = Math.min(shown.length - 1, Math.max(0, k));
    cards[current].tabIndex = 0;
    if ($("zoom").open) enlarge();
    else cards[current].focus();
    cards[current].scrollIntoView({ block: "nearest" });
  }
  function step(by) {
    if (current + by >= shown.length && by === 1) return turnTo(page() + 1);
    return focusCard(current + by);
  }
  function columns() {
    const cards = [...$("cards").children];
    return Math.max(1, cards.filter((c) => c.offsetTop === cards[0].offsetTop).length);
  }
  const ACTIONS = { a: "accept", s: "keep", d: "drop", q: "unsure" };
  const KEYS = {
    j: () => step(1), ArrowRight: () => step(1), k: () => step(-1), ArrowLeft: () => step(-1),
    ArrowDown: () => focusCard(current + columns()), ArrowUp: () => focusCard(current - columns()),
    r: () => shown.length && choose(shown[current]), u: () => { if (shown.length) decide(shown[current], "undo"); }, z: undoLast,
    e: () => ($("zoom").open ? $("zoom").close() : enlarge()),
    n: () => turnTo(page() + 1), p: () => turnTo(page() - 1),
    "/": () => { $("filters").open = true; $("q").focus(); }, "?": () => $("keys").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.metaKey || (event.ctrlKey && event.key !== "z")) return;
    if ($("choose").open || $("keys").open || event.target.closest("input, select, textarea, summary")) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (ACTIONS[key]) {
      if (shown.length && decide(shown[current], ACTIONS[key])) step(1);
    } else if (KEYS[key]) KEYS[key]();
    else return;
    event.preventDefault();
  });

  /* ---- export and import ---- */

  function download() {
    if (!decisions.size) return toast("Nothing is decided yet.");
    const cell = (value) => (/[",;\t\r\n]/.test(value) || value !== value.trim() ? '"' + value.replaceAll('"', '""') + '"' : value);
    const lines = [...decisions].sort((a, b) => a[0] - b[0]).map(([row, rest]) => [String(row), ...rest]);
    const text = [HEADER, ...lines].map((line) => line.map(cell).join(",") + "\r\n").join("");
    /* the mark at the beginning tells spreadsheet programs that this is UTF-8 */
    const address = URL.createObjectURL(new Blob(["\ufeff" + text], { type: "text/csv" }));
    make("a", { href: address, download: "decisions.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    unsaved = false;
    return toast(count(decisions.size) + " decisions were exported. Pass the file to the next run with --decisions.");
  }
  function parse(text) {
    text = text.replace(/^\ufeff/, "");
    const head = text.split("\n", 1)[0];
    const mark = [",", ";", "\t"].reduce((a, b) => (head.split(b).length > head.split(a).length ? b : a));
    const lines = [];
    let line = [], cell = "", quoted = false;
    const endLine = () => { line.push(cell); cell = ""; if (line.some((c) => c.trim())) lines.push(line); line = []; };
    for (let k = 0; k < text.length; k++) {
      const c = text[k];
      if (quoted) {
        if (c !== '"') cell += c;
        else if (text[k + 1] === '"') { cell += c; k++; } else quoted = false;
      } else if (c === '"' && !cell) quoted = true;
      else if (c === mark) { line.push(cell); cell = ""; }
      else if (c === "\n" || c === "\r") { if (c === "\r" && text[k + 1] === "\n") k++; endLine(); }
      else cell += c;
    }
    if (cell || line.length) endLine();
    return lines;
  }
  /* The same rules as `read_decisions` has; rows that this page does not show are checked there. */
  function problem(at, row, name, given, decision, chosen) {
    if (!/^\d+$/.test(row)) return "the row is not a number";
    if (!["keep", "relabel", "drop", "unsure", "new"].includes(decision)) return "the decision is not keep, relabel, drop, unsure or new";
    if (decision === "new" && (!chosen.trim() || D.classes.includes(chosen))) return "a new class has a name that no other class has";
    if (decision === "relabel" && !D.classes.includes(chosen)) return "the label is not one of the classes";
    if (decision === "keep" && chosen !== "" && chosen !== given) return "the label differs, write relabel";
    if (at !== undefined && (D.name[at] !== name || label(D.given[at]) !== given)) return "the data has another name or label there";
    return null;
  }
  function take(text) {
    const [header, ...lines] = parse(text);
    const names = (header || []).map((c) => c.trim().toLowerCase());
    const missing = HEADER.filter((c) => !names.includes(c));
    if (missing.length) return toast("Nothing was imported: the file has no column " + missing.join(", ") + ".");
    const where = new Map(D.row.map((row, i) => [row, i]));
    const changes = [], wrong = [];
    for (const line of lines) {
      const [row, name, given, written, chosen] = HEADER.map((c) => line[names.indexOf(c)] || "");
      const decision = written.trim().toLowerCase(), number = row.trim();
      const why = problem(where.get(+number), number, name, given, decision, chosen);
      if (why) wrong.push("row " + number + " (" + name + "): " + why);
      changes.push([+number, [name, given, decision, decision === "keep" || decision === "unsure" ? given : decision === "drop" ? "" : chosen]]);
    }
    if (wrong.length) return toast("Nothing was imported.\n" + wrong.slice(0, 10).join("\n") + (wrong.length > 10 ? "\nand " + count(wrong.length - 10) + " more" : ""));
    if (!changes.length) return toast("The file holds no decisions.");
    return change(changes, count(changes.length) + (changes.length === 1 ? " decision was imported." : " decisions were imported."));
  }

  /* ---- start ---- */

  for (const name of Object.keys(VIEWS)) {
    const [start, end] = D.groups[name];
    if (end === start && name !== "suspects") continue;
    const input = make("input", { type: "radio", name: "view", value: name });
    input.onchange = () => go({ view: name, given: "", suggested: "" });
    $("views").append(make("label", {}, input, VIEWS[name], make("span", { class: "number" }, count(end - start))));
  }
  for (const name of ["given", "suggested"]) {
    $(name).append(make("option", { value: "" }, "any"), ...D.classes.map((c, k) => make("option", { value: k }, c)));
    $(name).onchange = () => go({ [name]: $(name).value });
  }
  $("sort").append(...Object.entries(SORTS).map(([value, text]) => make("option", { value }, text)));
  $("sort").onchange = () => go({ sort: $("sort").value });
  $("q").oninput = () => go({ q: $("q").value });
  $("undecided").onchange = () => go({ undecided: $("undecided").checked ? "1" : "" });
  $("clear").onclick = () => { $("q").value = ""; go({ ...DEFAULTS, view: state.view }); };
  $("accept-page").onclick = () => acceptAll(shown);
  $("accept-pair").onclick = () => acceptAll(listed);
  $("undo").onclick = undoLast;
  $("export").onclick = download;
  $("help").onclick = () => $("keys").showModal();
  $("import").onclick = () => $("file").click();
  $("file").onchange = async () => {
    const [file] = $("file").files;
    $("file").value = "";
    if (file) take(await file.text());
  };
  for (const button of document.querySelectorAll("[data-close]")) button.onclick = () => button.closest("dialog").close();
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("close", () => focusCard(current));
  }
  window.addEventListener("hashchange", () => { show(); if (afterShow) afterShow(); afterShow = null; });
  window.addEventListener("pagehide", () => { if (timer) save(); });
  window.addEventListener("storage", (event) => { if (event.key === KEY) { load(); refresh(); } });
  window.addEventListener("beforeunload", (event) => { if (!storage && unsaved) event.preventDefault(); });
  if (matchMedia("(max-width: 900px)").matches) $("filters").open = false;
  $("cards").classList.add(D.kind === "embeddings" ? "table" : D.kind);
  if (D.large) $("cards").classList.add("large");
  load();
  note();
  show();
})();
