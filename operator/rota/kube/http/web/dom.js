// DOM helpers: external values become text, never markup, and unchanged nodes are not touched.

export const at = (id) => document.getElementById(id);

// Names and messages are untrusted: bidirectional and invisible characters are replaced by a mark, as in a terminal.
export function plain(told) {
  const text = String(told ?? "");
  if (/^[ -~]*$/.test(text)) return text;
  return text.replace(/\s+/gu, " ").replace(/(?! )[\p{C}\p{Z}]/gu, "\uFFFD");
}

export function put(node, told) {
  const text = plain(told);
  if (node.textContent !== text) node.textContent = text;
}

export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = plain(text);
  return made;
}

// Renders one child per item, in order; the child of a key is reused, so that it keeps the focus.
export function keep(parent, items, key, make, fill) {
  const before = parent.kept ?? new Map();
  const kept = new Map();
  for (const item of items) {
    const child = before.get(key(item)) ?? make(item);
    kept.set(key(item), child);
    fill(child, item);
  }
  for (const [name, child] of before) if (!kept.has(name)) child.remove();
  let next = parent.firstElementChild;
  const fresh = document.createDocumentFragment();
  for (const child of kept.values()) {
    if (child === next) next = next.nextElementSibling;
    else if (next) parent.insertBefore(child, next);
    else fresh.append(child);
  }
  parent.append(fresh);
  parent.kept = kept;
}

// Renders a table's rows. A column's `show` returns a text, [text, small print], or a function that fills the cell.
export function rows(body, items, key, columns) {
  const make = () => {
    const row = element("tr");
    columns.forEach(({ className }, number) => {
      const cell = element(number ? "td" : "th", "", className ?? "");
      if (!number) cell.scope = "row";
      row.append(cell);
    });
    return row;
  };
  const fill = (row, item) => columns.forEach(({ show }, number) => write(row.cells[number], show(item)));
  keep(body, items, key, make, fill);
}

function write(cell, told) {
  if (typeof told === "function") return told(cell);
  const [text, small = ""] = Array.isArray(told) ? told : [told];
  if (cell.told === `${text}\n${small}`) return undefined;
  cell.told = `${text}\n${small}`;
  cell.textContent = plain(text);
  if (small) cell.append(element("small", small));
  return undefined;
}
