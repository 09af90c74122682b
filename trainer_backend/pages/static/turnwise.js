// What the pages do by themselves: charts, following a run, reading tokens, turning pages with the keyboard.
import { refresh } from "./charts.js";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// ---- parts of a page that the server writes again: [data-live] holds the address of the part

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
  // What a reader has opened, typed or ticked stays as it is.
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  children(old, fresh);
}

// Whether all of them came.
async function renew(parts) {
  let complete = true;
  for (const address of new Set(parts.map((part) => part.dataset.live))) {
    const answer = await fetch(address, { headers: { "HX-Request": "true" } }).catch(() => null);
    if ([401, 404].includes(answer?.status)) return location.reload(); // the session has ended, or the job is deleted
    if (!answer?.ok) { complete = false; continue; } // a service that is away for a moment is asked again
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
  else if (!complete && !first) location.reload(); // a metric that the run did not have before: another chart
}

// Says that the page shows what was; with nothing, that it does not any more. What others have said stays.
const AWAY = "This page is behind: the service did not answer. It is asked again.";
function late(why) {
  const place = document.getElementById("told");
  if (!why && !place.dataset.late) return;
  if (place.textContent !== why) place.textContent = why;
  place.className = why ? "note" : "";
  place.dataset.late = why;
}

// ---- a run that goes on: the server says when something is new

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

// Until the run has ended; one that is resumed is followed again.
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
    if (stream.readyState !== EventSource.CLOSED) return; // by itself a browser asks again; not where it was refused
    if (source === stream) source = null;
    later();
  });
  stream.addEventListener("end", () => {
    stream.close();
    if (source === stream) source = null;
  });
}

// The head of the page says why there is no stream, and from where on the next one has to tell.
function later() {
  again ??= setTimeout(async () => {
    again = null;
    if (document.hidden) return; // `wake` comes
    if (await renew(all("[data-events]"))) follow();
    else later();
  }, AGAIN_MS);
}

// A browser opens six connections to a service: hidden pages leave them to visible ones.
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

// A choice of how charts are drawn changes the parts of the page that depend on it: they have [data-view].
document.addEventListener("view", ({ detail }) => {
  const parts = all("[data-view]");
  for (const part of parts) part.dataset.live = detail;
  renew(parts);
});

// Until it comes without [data-every]: nothing of it is under way any more. A filter puts another part in its place.
function every({ id, dataset }) {
  const round = setInterval(async () => {
    if (document.hidden) return;
    const part = document.getElementById(id);
    if (!part?.dataset.every) return clearInterval(round);
    await renew([part]);
    if (part.dataset.tells) news(part.dataset.tells);
  }, Number(dataset.every) * 1000);
}

// ---- a list: its order and its ticks belong to the form of its filters, and stand outside of it

document.addEventListener("change", ({ target }) => {
  if (target.getAttribute("form") === "filters") window.htmx.trigger("#filters", "submit");
});

// ---- tokens: pointed at, or walked through with the arrow keys; what is known of one stands below

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

// ---- keys: the decision before and after; nothing while text is entered

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
  if (event.target.closest("input, select, textarea") || through(event)) return;
  const name = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = name && document.querySelector(`.pager a[rel=${name}]`);
  if (link) { event.preventDefault(); link.click(); }
});

// ---- the list of decisions keeps the chosen one in sight and marked

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

// ---- the job form: a finding leads to its line

document.addEventListener("click", (event) => {
  const line = Number(event.target.closest?.("[data-line]")?.dataset.line);
  const text = document.querySelector("textarea[name=toml]");
  if (!line || !text) return;
  const lines = text.value.split("\n"), start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  text.focus();
  text.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
});

// ---- what has taken the place of what is said to who does not see it; and is coloured as what stood there was

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
// What a check refuses is an answer for the page too, and an error that is none must not pass unseen.
document.addEventListener("htmx:responseError", (event) => {
  const { xhr } = event.detail;
  const page = new DOMParser().parseFromString(xhr.responseText, "text/html");
  const said = page.querySelector(".note.bad")?.textContent ?? `${xhr.status} ${xhr.statusText}`;
  const place = document.getElementById("told");
  place.textContent = said.trim();
  place.className = "note bad";
});

// Another job to begin from takes the place of what was written: not without asking.
document.addEventListener("htmx:confirm", (event) => {
  const text = document.querySelector("textarea[name=toml]");
  if (event.target.name !== "like" || !text || text.value === text.defaultValue) return;
  event.preventDefault();
  if (confirm("Give up what you have written?")) event.detail.issueRequest(true);
  else event.target.value = event.target.querySelector("option[selected]")?.value ?? event.target.value;
});

choose();
addEventListener("load", choose); // the style may come after the script
all(".log").forEach((log) => { log.scrollTop = log.scrollHeight; });
all("[data-charts]").forEach((room) => redraw(room));
all("[data-every]").forEach(every);
follow();
