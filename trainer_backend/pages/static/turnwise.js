// The scripts of the pages: following a run, keys for tokens and decisions, lists, the job form. charts.js draws the charts.
import { refresh } from "./charts.js";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// ---- parts of a page that are loaded again: [data-live] holds the address to load a part from

function children(old, fresh) {
  const named = new Map([...old.children].filter((one) => one.id).map((one) => [one.id, one]));
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const same = wanted.id ? named.get(wanted.id) : place && !place.id ? place : null;
    if (!same) old.insertBefore(wanted, place);
    else {
      if (same === place) place = place.nextSibling;
      else old.insertBefore(same, place);
      patch(same, wanted);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function patch(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.id !== fresh.id) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) { old.data = fresh.data; return; }
  // Details that a reader has opened stay open. Typed and ticked values stay too: they are no attributes.
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  children(old, fresh);
}

// Loads the parts again; resolves to whether all of them came.
async function renew(parts) {
  let complete = true;
  for (const address of new Set(parts.map((part) => part.dataset.live))) {
    const answer = await fetch(address, { headers: { "HX-Request": "true" } }).catch(() => null);
    if ([401, 404].includes(answer?.status)) return location.reload(); // the session has ended, or the job is deleted
    if (!answer?.ok) { complete = false; continue; } // the service may be away for a moment: the part stays as it is
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of parts.filter((one) => one.dataset.live === address)) {
      const fresh = page.getElementById(part.id);
      if (!fresh) continue;
      const atEnd = part.matches(".log") && part.scrollTop + part.clientHeight > part.scrollHeight - 40;
      patch(part, document.adoptNode(fresh));
      if (atEnd) part.scrollTop = part.scrollHeight;
      window.htmx.process(part);
    }
  }
  if (!complete) late(AWAY);
  else if (!document.querySelector("[data-events]") || source?.readyState === EventSource.OPEN) late("");
  return complete;
}

async function redraw(room) {
  const first = room.getAttribute("aria-busy") === "true";
  const complete = await refresh(room).catch(() => null);
  if (complete === null) late(AWAY);
  else if (!complete && !first) location.reload(); // a new metric needs a new chart
}

// Shows the note that the page is out of date; an empty `why` removes it. Notes of other functions stay.
const AWAY = "This page is behind: the service did not answer. It is asked again.";
function late(why) {
  const place = document.getElementById("told");
  if (!why && !place.dataset.late) return;
  if (place.textContent !== why) place.textContent = why;
  place.className = why ? "note" : "";
  place.dataset.late = why;
}

// ---- an active run: the server sends an event when something is new

const AGAIN_MS = 3000;
let source = null, waiting = null, again = null;
function news(what) {
  waiting ??= { kinds: new Set(), timer: setTimeout(bring, 250) };
  waiting.kinds.add(what);
}

function bring() {
  const { kinds } = waiting;
  waiting = null;
  renew(all("[data-on]").filter((part) => part.dataset.on.split(" ").some((kind) => kinds.has(kind))));
  if (kinds.has("metrics")) all("[data-charts]").forEach((room) => redraw(room));
}

// Opens the stream of events, which ends with the run; a resumed run is followed again.
function follow() {
  const part = document.querySelector("[data-events]");
  if (!part || source) return;
  const stream = new EventSource(part.dataset.events);
  source = stream;
  for (const kind of ["metrics", "state", "log"]) stream.addEventListener(kind, () => news(kind));
  stream.addEventListener("open", () => late(""));
  stream.addEventListener("store", () => {
    late("This page is behind: the database of the service does not answer.");
    later();
  });
  stream.addEventListener("error", () => {
    late(AWAY);
    if (stream.readyState !== EventSource.CLOSED) return; // a browser reconnects by itself, unless it was refused
    if (source === stream) source = null;
    later();
  });
  stream.addEventListener("end", () => {
    stream.close();
    if (source === stream) source = null;
  });
}

// Tries again after a while. The page's head, loaded again, has the run's state and the address of the next stream.
function later() {
  again ??= setTimeout(async () => {
    again = null;
    if (document.hidden) return; // `wake` follows later
    if (await renew(all("[data-events]"))) follow();
    else later();
  }, AGAIN_MS);
}

// A browser opens at most six connections to a service, so hidden pages close theirs.
function rest() {
  source?.close();
  source = null;
}
addEventListener("pagehide", rest);
addEventListener("pageshow", ({ persisted }) => persisted && wake());
document.addEventListener("visibilitychange", () => (document.hidden ? rest() : wake()));
function wake() {
  if (!document.querySelector("[data-events]")) return;
  follow();
  for (const kind of ["state", "metrics", "log"]) news(kind);
}

// Parts with [data-view] depend on the reader's choices for charts, and are loaded again when those change.
document.addEventListener("view", ({ detail }) => {
  const parts = all("[data-view]");
  for (const part of parts) part.dataset.live = detail;
  renew(parts);
});

// Loads a part at intervals, until it comes without [data-every]: nothing in it is active any more. Filters replace it, hence the id.
function every({ id, dataset }) {
  const round = setInterval(async () => {
    if (document.hidden) return;
    const part = document.getElementById(id);
    if (!part?.dataset.every) return clearInterval(round);
    await renew([part]);
    if (part.dataset.tells) news(part.dataset.tells);
  }, Number(dataset.every) * 1000);
}

// ---- lists: the fields for order and choice belong to the form of the filters, but are outside of its element

document.addEventListener("change", ({ target }) => {
  if (target.getAttribute("form") === "filters") window.htmx.trigger("#filters", "submit");
});

// ---- tokens: chosen by the pointer or the arrow keys; the line below describes the chosen one

function pointed(token) {
  const room = token.closest(".coloured");
  all(".at", room).forEach((one) => one.classList.remove("at"));
  token.classList.add("at");
  room.querySelector(".readout").textContent = `‹${token.textContent.replaceAll("\n", "↵")}› ${token.title}`;
}

function through(event) {
  const strip = event.target.closest(".tokens");
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!strip || !step) return false;
  const tokens = all("i", strip), at = tokens.findIndex((one) => one.classList.contains("at"));
  const next = tokens[Math.min(tokens.length - 1, Math.max(0, at < 0 ? tokens.findIndex((one) => one.classList.contains("m1")) : at + step))];
  if (next) { pointed(next); next.scrollIntoView({ block: "nearest" }); }
  event.preventDefault();
  return true;
}

document.addEventListener("pointerover", (event) => {
  const token = event.target.closest?.(".tokens i");
  if (token) pointed(token);
});

// ---- arrow keys lead to the previous and the next decision, except in a field

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
  if (event.target.closest("input, select, textarea") || through(event)) return;
  const name = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = name && document.querySelector(`.pager a[rel=${name}]`);
  if (link) { event.preventDefault(); link.click(); }
});

// ---- the list of decisions marks the chosen one, and scrolls to it

function choose() {
  const turn = document.querySelector("[data-turn]")?.dataset.turn;
  if (!turn) return;
  all(".decisions tr[aria-current]").forEach((row) => row.removeAttribute("aria-current"));
  const row = document.getElementById(`turn-${turn}`);
  const list = row?.closest(".decisions");
  if (!row || !list) return;
  row.setAttribute("aria-current", "true");
  const [line, box] = [row.getBoundingClientRect(), list.getBoundingClientRect()];
  if (line.top < box.top + 40 || line.bottom > box.bottom) list.scrollTop += line.top - box.top - (box.height - line.height) / 2;
}

// ---- the job form: a click on a finding selects its line

document.addEventListener("click", (event) => {
  const line = Number(event.target.closest?.("[data-line]")?.dataset.line);
  const text = document.querySelector("textarea[name=toml]");
  if (!line || !text) return;
  const lines = text.value.split("\n"), start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  text.focus();
  text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
});

// ---- after htmx has replaced a part: screen readers hear its title, and tokens keep the chosen colouring

const title = () => document.querySelector("#decision-title, #list caption, #list .empty")?.textContent ?? "";
let shown = title(), colour = null;
function tellOfIt() {
  if (title() === shown) return;
  shown = title();
  document.getElementById("shown").textContent = shown;
}
document.addEventListener("change", ({ target }) => { if (target.name === "by") colour = target.value; });
function recolour() {
  const chosen = colour && document.querySelector(`input[name=by][value=${colour}]`);
  if (chosen) chosen.checked = true;
}

document.addEventListener("htmx:afterSettle", () => {
  choose();
  tellOfIt();
  recolour();
  follow();
  all("[data-charts][aria-busy=true]").forEach((room) => redraw(room));
});
// htmx drops answers with an error status: show their message, or else the status.
document.addEventListener("htmx:responseError", (event) => {
  const { xhr } = event.detail;
  const page = new DOMParser().parseFromString(xhr.responseText, "text/html");
  const said = page.querySelector(".note.bad")?.textContent ?? `${xhr.status} ${xhr.statusText}`;
  const place = document.getElementById("told");
  place.textContent = said.trim();
  place.className = "note bad";
});

// Choosing another job to begin from replaces the text in the form: ask first if it was edited.
document.addEventListener("htmx:confirm", (event) => {
  const text = document.querySelector("textarea[name=toml]");
  if (event.target.name !== "like" || !text || text.value === text.defaultValue) return;
  event.preventDefault();
  if (confirm("Give up what you have written?")) event.detail.issueRequest(true);
  else event.target.value = event.target.querySelector("option[selected]")?.value ?? event.target.value;
});

choose();
addEventListener("load", choose); // again, as the style sheet may load after the script
all(".log").forEach((log) => { log.scrollTop = log.scrollHeight; });
all("[data-charts]").forEach((room) => redraw(room));
all("[data-every]").forEach(every);
follow();
