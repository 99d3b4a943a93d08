/** Building and updating nodes. Text is only ever set as text: names and ids come from clients. */

const SVG = "http://www.w3.org/2000/svg";
const children = new WeakMap();

/** @param {string} id */
export const byId = (id) => document.getElementById(id);

/**
 * An HTML element. `say` is its text, everything else an attribute; null and false leave one out.
 * @param {string} tag
 * @param {Record<string, unknown>} attributes
 * @param {...(Node|string)} inside
 */
export function el(tag, attributes = {}, ...inside) {
  return filled(document.createElement(tag), attributes, inside);
}

/** The same for an SVG element. */
export function svg(tag, attributes = {}, ...inside) {
  return filled(document.createElementNS(SVG, tag), attributes, inside);
}

function filled(node, { say: text, ...attributes }, inside) {
  put(node, attributes);
  if (text !== undefined) node.textContent = text;
  node.append(...inside);
  return node;
}

/** Set attributes, touching only what differs. */
export function put(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
  return node;
}

/** Set the text, if it differs: what a reader has selected stays selected. */
export function say(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
  return node;
}

/** A part of the whole as the custom property --part, from 0 to 1; style sheets make a width of it. */
export function part(node, value) {
  node.style.setProperty("--part", Math.min(1, Math.max(0, value || 0)).toFixed(4));
  return node;
}

/**
 * One child for each item, made once and updated after: focus, scroll and selection survive.
 * @template T
 * @param {Element} parent whose children are all kept here
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

/** Follow an element's width in pixels, now and whenever it changes. */
export function onWidth(node, draw) {
  new ResizeObserver(([entry]) => draw(entry.contentRect.width)).observe(node);
}
