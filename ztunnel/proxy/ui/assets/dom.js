// Elements of the page: texts, tables and tiles. Names come from the mesh and are not trusted, so every text is set by
// textContent and never parsed as HTML.

import { number } from "./words.js";

export const $ = (id) => document.getElementById(id);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
export function child(parent, tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Fill a table's body. A cell is a text, or {text, sub, className, tag, title, button}. Rows and cells are kept,
// so that selections and focus survive an event.
export function fill(tableId, rows, nothing) {
  const body = $(tableId).tBodies[0];
  const heads = $(tableId).tHead.rows[0].cells;
  if (!rows.length) {
    if (!body.querySelector("td.empty") || body.rows.length !== 1) {
      body.replaceChildren();
      const cell = child(child(body, "tr"), "td", "empty");
      cell.colSpan = heads.length;
    }
    setText(body.rows[0].cells[0], nothing);
    return;
  }
  if (body.querySelector("td.empty")) body.replaceChildren();
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] || child(body, "tr");
    cells.forEach((given, place) => {
      const cell = row.cells[place] || child(row, "td");
      cell.dataset.name = heads[place].textContent;  // shown where a row is a card
      const value = typeof given === "object" ? given : { text: given };
      const print = JSON.stringify([value.text, value.sub, value.className, value.tag, value.title, value.label]);
      if (cell.dataset.print === print) { cell.act = value.act; return; }
      cell.dataset.print = print;
      cell.act = value.act;
      const held = cell.querySelector("button");
      if (held && value.act) {
        held.setAttribute("aria-label", value.label);
        return;
      }
      cell.replaceChildren();
      cell.className = value.className || "";
      cell.title = value.title || "";
      if (value.act) {
        const button = child(cell, "button", "small", value.text);
        button.type = "button";
        button.setAttribute("aria-label", value.label);
        button.addEventListener("click", () => cell.act());
      } else if (value.tag) {
        child(cell, "span", `tag ${value.tag}`, value.text);
      } else {
        cell.append(value.text);
      }
      if (value.sub) child(cell, "small", "", value.sub);
    });
  });
}
export const num = (text, bad) => ({ text, className: bad ? "num bad" : "num" });
export const security = (value) => (value === "none" ? { text: "–", title: "ended before anything was sent" }
  : { text: value, tag: value === "mTLS" ? "mtls" : "plain" });

export function tiles(id, entries) {
  const list = $(id);
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach(([name, value, bad], index) => {
    let tile = list.children[index];
    if (!tile) {
      tile = child(list, "div");
      child(tile, "dt");
      child(tile, "dd");
    }
    setText(tile.children[0], name);
    setText(tile.children[1], value);
    tile.children[1].className = bad ? "bad" : "";
  });
}
export function rest(id, list, what) {
  setText($(`rest-${id}`), list.left_out ? `${number(list.left_out)} more ${what} are not shown.` : "");
}
