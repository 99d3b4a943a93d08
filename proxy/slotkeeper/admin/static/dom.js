/** Building and updating nodes. Text is never set as markup, because names and ids come from clients. */

const SVG = "http://www.w3.org/2000/svg";
const children = new WeakMap();

/** @param {string} id */
export const byId = (id) => document.getElementById(id);

/**
 * Make an HTML element. `say` is its text; every other key is an attribute, left out if it is null or false.
 * @param {string} tag
 * @param {Record<string, unknown>} attributes
 * @param {...(Node|string)} inside
 */
export function el(tag, attributes = {}, ...inside) {
  return filled(document.createElement(tag), attributes, inside);
}

/** Make an SVG element; see `el`. */
export function svg(tag, attributes = {}, ...inside) {
  return filled(document.createElementNS(SVG, tag), attributes, inside);
}

function filled(node, { say: text, ...attributes }, inside) {
  put(node, attributes);
  if (text !== undefined) node.textContent = text;
  node.append(...inside);
  return node;
}

/** Set attributes; those that do not change are not written. */
export function put(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
  return node;
}

/** Set the text if it differs. An unchanged text keeps the reader's selection. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
  return node;
}

/** Set the custom property --part, from 0 to 1; the style sheets turn it into a width. */
export function part(node, value) {
  node.style.setProperty("--part", Math.min(1, Math.max(0, value || 0)).toFixed(4));
  return node;
}

/**
 * Keep one child for each item. It is made once and updated later, so focus, scroll and selection survive.
 * @template T
 * @param {Element} parent all its children are managed by this function
 * @param {T[]} items
 * @param {(item: T) => string|number} keyOf unique among the items
 * @param {(item: T) => Element} make
 * @param {(node: Element, item: T) => void} update
 */
export function keyed(parent, items, keyOf, make, update = () => {}) {
  const known = children.get(parent) ?? new Map();
  const keys = items.map(keyOf);
  const wanted = new Set(keys);
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstElementChild;
  items.forEach((item, index) => {
    const node = known.get(keys[index]) ?? make(item);
    known.set(keys[index], node);
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  });
  children.set(parent, known);
}

/** Call `draw` with an element's width in pixels, now and whenever it changes. */
export function onWidth(node, draw) {
  new ResizeObserver(([entry]) => draw(entry.contentRect.width)).observe(node);
}
