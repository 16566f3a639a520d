// DOM helpers: external values become text, never markup, and unchanged nodes are not touched.

export const byId = (id) => document.getElementById(id);

// Names and messages are untrusted: bidirectional and invisible characters are replaced by a mark, as in a terminal.
export function plain(value) {
  const text = String(value ?? "");
  if (/^[ -~]*$/.test(text)) return text;
  return text.replace(/\s+/gu, " ").replace(/(?! )[\p{C}\p{Z}]/gu, "\uFFFD");
}

export function setText(node, value) {
  const text = plain(value);
  if (node.textContent !== text) node.textContent = text;
}

export function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = plain(text);
  return node;
}

// Renders one child per item, in order; the child of a key is reused, so that it keeps the focus.
export function renderChildren(parent, items, key, make, fill) {
  const previous = parent.childByKey ?? new Map();
  const childByKey = new Map();
  for (const item of items) {
    const child = previous.get(key(item)) ?? make(item);
    childByKey.set(key(item), child);
    fill(child, item);
  }
  for (const [name, child] of previous) if (!childByKey.has(name)) child.remove();
  let next = parent.firstElementChild;
  const added = document.createDocumentFragment();
  for (const child of childByKey.values()) {
    if (child === next) next = next.nextElementSibling;
    else if (next) parent.insertBefore(child, next);
    else added.append(child);
  }
  parent.append(added);
  parent.childByKey = childByKey;
}

// Renders a table's rows. A column's `show` returns a text, [text, small print], or a function that fills the cell.
export function renderRows(body, items, key, columns) {
  const make = () => {
    const row = element("tr");
    columns.forEach(({ className }, index) => {
      const cell = element(index ? "td" : "th", "", className ?? "");
      if (!index) cell.scope = "row";
      row.append(cell);
    });
    return row;
  };
  const fill = (row, item) => columns.forEach(({ show }, index) => fillCell(row.cells[index], show(item)));
  renderChildren(body, items, key, make, fill);
}

function fillCell(cell, content) {
  if (typeof content === "function") return content(cell);
  const [text, small = ""] = Array.isArray(content) ? content : [content];
  if (cell.content === `${text}\n${small}`) return undefined;
  cell.content = `${text}\n${small}`;
  cell.textContent = plain(text);
  if (small) cell.append(element("small", small));
  return undefined;
}
