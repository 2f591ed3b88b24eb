// Reads the page as a person sees it. Returns {lines, elements, scroll, height, page}: a line is {text, top, bottom},
// an element is {text, value, field, sends, disabled}; elements are numbered from 1 over the whole page.
const BLOCKS = /^(block|flex|grid|list-item|table|table-row)$/;
const squeeze = (text) => text.replace(/\s+/g, " ").trim();
const lines = [], elements = [], nodes = [];
let line = null;
const close = () => { if (line && line.text.trim()) lines.push({...line, text: squeeze(line.text)}); line = null; };
const add = (text, box, loose) => {
  if (!line) line = {text: "", top: box.top, bottom: box.bottom};
  line.text += (loose ? " " : "") + text + (loose ? " " : "");
  line.top = Math.min(line.top, box.top);
  line.bottom = Math.max(line.bottom, box.bottom);
};
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE) {
    if (!node.data.trim()) { if (line) line.text += " "; return; }
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.width && box.height) add(node.data, box);
    return;
  }
  if (node.nodeType !== Node.ELEMENT_NODE || /^(SCRIPT|STYLE|TEMPLATE|NOSCRIPT|SVG)$/i.test(node.tagName)) return;
  if (!node.checkVisibility({visibilityProperty: true})) return;
  const display = getComputedStyle(node).display, box = node.getBoundingClientRect();
  const field = node.matches("input:not([type=hidden],[type=radio],[type=checkbox]),textarea");
  if (field || node.matches("button,a[href],summary")) {
    if (!box.width || !box.height) return;
    nodes.push(node);
    const text = squeeze(field ? node.getAttribute("aria-label") || node.name : node.innerText || node.getAttribute("aria-label") || "");
    const sends = node.type === "submit" && node.form !== null && node.form.checkValidity();
    elements.push({text, value: node.value || "", field: field ? node.name : "", sends, disabled: node.disabled === true});
    const chosen = node.getAttribute("aria-pressed") === "true" ? ", chosen" : "", off = node.disabled ? ", disabled" : "";
    add(field ? `[${nodes.length}: field] ${text}: "${node.value}"` : `[${nodes.length}${chosen}${off}] ${text}`, box, true);
    return;
  }
  const block = BLOCKS.test(display) && node.textContent.trim() !== "";
  if (block) close();
  if (display === "table-cell" && line) line.text += " | ";
  node.childNodes.forEach(walk);
  if (block) close();
};
walk(document.body);
close();
window.__shown = nodes;
return {lines, elements, scroll: Math.round(scrollY), height: innerHeight, page: document.documentElement.scrollHeight};
