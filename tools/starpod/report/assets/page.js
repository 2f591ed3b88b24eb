const tip = document.getElementById('tip'), NS = 'http://www.w3.org/2000/svg';
function readable(root) { for (const svg of root.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover), first = data.lines[0]?.points;
  if (!first) continue;  // zoomed in between two points
  const add = (name, a) => { const e = document.createElementNS(NS, name);
    for (const k in a) e.setAttribute(k, a[k]); svg.append(e); return e; };
  const cursor = add('line', {stroke: 'var(--muted)', visibility: 'hidden', y1: data.edges[0], y2: data.edges[1]});
  const dots = data.dots ? data.lines.map(l => add('circle', {r: 3.5, fill: `var(--c${l.colour})`, visibility: 'hidden'})) : [];
  let at = first.length - 1;
  const nearest = (points, px) => points.reduce((a, b) => Math.abs(b[0] - px) < Math.abs(a[0] - px) ? b : a);
  const show = px => {
    const lead = nearest(data.lines.flatMap(l => l.points), px);
    at = Math.max(0, first.findIndex(p => p[0] >= lead[0]));
    cursor.setAttribute('x1', lead[0]); cursor.setAttribute('x2', lead[0]); cursor.setAttribute('visibility', 'visible');
    tip.replaceChildren(`${data.x} ${lead[2]}`);
    data.lines.forEach((line, i) => {
      const point = nearest(line.points, lead[0]);
      // A line that was not measured here has nothing to say here.
      const here = Math.abs(point[0] - lead[0]) < 6;
      if (dots[i]) {
        dots[i].setAttribute('cx', point[0]);
        dots[i].setAttribute('cy', point[1]);
        dots[i].setAttribute('visibility', here ? 'visible' : 'hidden');
      }
      if (!here) return;
      const row = document.createElement('div'), key = document.createElement('i');
      key.style.background = `var(--c${line.colour})`;
      row.append(key, `${line.label} ${point[3]}`);
      tip.append(row);
    });
    const box = svg.getBoundingClientRect(), x = box.left + lead[0] * box.width / svg.viewBox.baseVal.width;
    tip.style.visibility = 'visible';
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
    tip.style.top = Math.max(4, box.top - tip.offsetHeight + 24) + 'px';
  };
  const hide = () => { tip.style.visibility = 'hidden';
    for (const e of [cursor, ...dots]) e.setAttribute('visibility', 'hidden'); };
  svg.addEventListener('pointermove', e => { const box = svg.getBoundingClientRect();
    show((e.clientX - box.left) * svg.viewBox.baseVal.width / box.width); });
  svg.addEventListener('pointerleave', hide); svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', e => { const move = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (move) { e.preventDefault(); show(first[Math.max(0, Math.min(first.length - 1, at + move))][0]); } });
} }
readable(document);
