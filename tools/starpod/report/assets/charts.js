// Charts: Plotly draws what the server wrote into data-chart. The charts of a page share zoom, smoothing, logarithmic
// axes, hidden lines and the cursor. These settings are kept in the page's address.
const curves = (() => {
const SMOOTHING = {none: [Infinity, 1], light: [30, 3], medium: [10, 5], strong: [4, 9]};  // points / first, at least the second
const FORMATS = {
  share: {tickformat: '.3~g', hoverformat: '.3~g', ticksuffix: ' %'}, seconds: {tickformat: '.3~s', hoverformat: '.3~s', ticksuffix: 's'},
  count: {tickformat: '.4~s', hoverformat: ',.4~g'}, rate: {tickformat: '.3~s', hoverformat: '.4~s'}, number: {tickformat: '.3~g', hoverformat: '.4~g'},
};
const LEFT = 64, RIGHT = 12, TOP = 44, BOTTOM = 34;  // the same in all charts, so that they line up
const asked = new URLSearchParams(document.body.dataset.view ?? location.search);
const view = {
  smooth: asked.get('smooth') in SMOOTHING ? asked.get('smooth') : 'light', log: new Set(asked.getAll('log')),
  from: edge(asked.get('from')), to: edge(asked.get('to')), hidden: new Set(asked.getAll('hide')),
};
const charts = new Map(), inSight = new Set();
const packed = document.getElementById('plotly');
const library = packed?.type === 'text/plain' ? unpack(packed.textContent)
  : new Promise(resolve => packed?.addEventListener('load', resolve));  // it comes after this script

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const script = document.createElement('script');
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}
function edge(text) { return text && Number.isFinite(Number(text)) ? Number(text) : null; }

const observer = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    inSight[isIntersecting ? 'add' : 'delete'](target);
    if (isIntersecting) draw(target);
  }
}, {rootMargin: '200px'});
const sizes = new ResizeObserver(entries => entries.forEach(({target}) => {
  const chart = charts.get(target);
  if (chart?.width && chart.width !== target.clientWidth) redraw([target]);
}));
function readable(part) {  // finds the charts of a part of the page that is new, and keeps numbers and their units in one line
  const texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT, node =>
    node.parentElement?.closest('pre, code, textarea, script, style, svg') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (/\d %/.test(text.data)) text.data = text.data.replace(/(\d) %/g, '$1\u00a0%');
  }
  for (const div of charts.keys()) if (!div.isConnected) { charts.delete(div); inSight.delete(div); }
  for (const div of part.querySelectorAll('[data-chart]')) {
    charts.set(div, JSON.parse(div.dataset.chart));
    observer.observe(div);
    sizes.observe(div);
  }
}
function redraw(some = [...charts.keys()]) {
  for (const div of some) charts.get(div).width = 0;
  some.filter(div => inSight.has(div)).forEach(draw);
}
addEventListener('themechange', () => redraw());

// --- what is drawn ---
function smoothed(values) {
  const [divisor, least] = SMOOTHING[view.smooth], reach = Math.floor(Math.max(values.length / divisor, least) / 2);
  const sums = [0];
  for (const y of values) sums.push(sums.at(-1) + y);
  return values.map((_, at) => {  // the window shrinks at the ends, which would bend a trend otherwise
    const radius = Math.min(reach, at, values.length - 1 - at);
    return (sums[at + radius + 1] - sums[at - radius]) / (2 * radius + 1);
  });
}
function colours() {
  const probe = document.body.appendChild(document.createElement('i'));
  const found = {};
  for (const name of ['ink', 'muted', 'grid', 'surface', ...Array.from({length: 8}, (_, at) => `c${at}`)]) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}
const faded = (colour, alpha) => colour.replace(/rgba?\(([^)]+)\)/, (_, parts) => `rgba(${parts.split(',').slice(0, 3)}, ${alpha})`);
const alike = chart => [...charts.values()].filter(other => other.x === chart.x && Boolean(other.ticks.length) === Boolean(chart.ticks.length));
function across(chart) {  // the range of x, the same for all charts over the same quantity
  const xs = alike(chart).flatMap(other => other.lines.flatMap(line => [line.points[0][0], line.points[0].at(-1)]));
  const positive = xs.filter(x => x > 0);
  const low = view.from ?? Math.min(...(view.log.has('x') ? positive : xs)), high = view.to ?? Math.max(...xs);
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}
async function draw(div) {
  const chart = charts.get(div);
  if (!chart || chart.width || !div.clientWidth) return;
  chart.width = div.clientWidth;
  await library;
  const paint = colours(), scale = chart.kind === 'share' ? 100 : 1, [low, high] = across(chart);
  const logX = view.log.has('x') && !chart.ticks.length, logY = (view.log.has('y') || chart.log) && !chart.stacked;
  const seen = (xs, ys) => ys.filter((y, at) => xs[at] >= low && xs[at] <= high && (!logY || y > 0));
  const scaled = ys => ys.map(y => y * scale);
  const traces = [], values = [], shown = chart.lines.filter(line => !view.hidden.has(line.label));
  for (const line of chart.lines) {
    const colour = paint[`c${line.colour}`], [xs, raw] = [line.points[0], scaled(line.points[1])];
    const visible = shown.includes(line), smooth = !line.dots && !chart.ticks.length && view.smooth !== 'none';
    const ys = smooth ? smoothed(raw) : raw, [bandX, lows, highs] = [line.band[0], scaled(line.band[1]), scaled(line.band[2])];
    const behind = {mode: 'lines', hoverinfo: 'skip', showlegend: false, visible};
    if (bandX.length && !chart.stacked) {
      traces.push({...behind, x: bandX, y: lows, line: {width: 0}},
        {...behind, x: bandX, y: highs, line: {width: 0}, fill: 'tonexty', fillcolor: faded(colour, 0.15)});
      if (visible) values.push(...seen(bandX, lows), ...seen(bandX, highs));
    }
    for (const [x, y] of [...line.faint.map(([x, y]) => [x, scaled(y)]), ...(smooth && !chart.stacked ? [[xs, raw]] : [])]) {
      traces.push({...behind, x, y, line: {width: 1, color: faded(colour, 0.35)}});
      const sorted = seen(x, y).sort((a, b) => a - b), cut = Math.floor(sorted.length / 100);
      if (visible) values.push(...sorted.slice(cut, sorted.length - cut));  // no single peak flattens a curve
    }
    const interval = bandX.length ? xs.map(x => { const at = bandX.indexOf(x);
      return at < 0 ? '' : ` (${figure(chart, lows[at])} to ${figure(chart, highs[at])})`; }) : xs.map(() => '');
    traces.push({x: xs, y: ys, customdata: interval, name: line.label, visible: visible || 'legendonly', mode: line.dots || xs.length === 1 ? 'lines+markers' : 'lines',
      line: {width: 2, color: colour}, marker: {size: 6, color: colour}, hovertemplate: '%{y}%{customdata}',
      ...(chart.stacked && {stackgroup: 'one', fillcolor: faded(colour, 0.75), line: {width: 0.5, color: colour}})});
    if (visible) values.push(...seen(xs, ys));
  }
  values.push(...chart.rules.map(([y]) => y * scale));
  const rangeY = upright(chart, values, logY), height = div.clientHeight - TOP - BOTTOM;
  const decadesY = logY ? decades(...rangeY.map(power => 10 ** power)) : [];
  const part = y => logY ? (Math.log10(y) - rangeY[0]) / (rangeY[1] - rangeY[0]) : (y - rangeY[0]) / (rangeY[1] - rangeY[0]);
  const marks = chart.marks.filter(([x, , name, colour]) => (!name || shown.some(line => line.colour === colour)) && x >= low && x <= high && (!logX || x > 0));
  const label = {showarrow: false, font: {size: 11, color: paint.muted}};
  let floor = -Infinity;
  const rules = chart.rules.toSorted((a, b) => a[0] - b[0]).map(([y, text]) => {  // labels of close lines are moved apart
    floor = Math.max(part(y * scale) * height, floor + 13);
    return {...label, text, xref: 'paper', x: 1, xanchor: 'right', yref: 'paper', y: 0, yshift: floor + 8, bgcolor: faded(paint.surface, 0.7)};
  });
  const axis = {gridcolor: paint.grid, zeroline: false, linecolor: paint.grid, color: paint.muted};
  const legend = chart.lines.length > 1;
  const layout = {
    width: chart.width, height: div.clientHeight, margin: {l: LEFT, r: RIGHT, t: TOP, b: BOTTOM},
    title: {text: plain(chart.title), x: 0, xanchor: 'left', xref: 'container', y: 1, yanchor: 'top', pad: {t: 6}, font: {size: 13, color: paint.ink, weight: 600}},
    font: {family: 'system-ui, sans-serif', size: 11, color: paint.muted}, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    hovermode: 'x unified', hoverlabel: {bgcolor: paint.surface, bordercolor: paint.grid, font: {color: paint.ink}, namelength: -1}, hoverdistance: 40,
    dragmode: matchMedia('(pointer: coarse)').matches ? false : 'zoom', showlegend: legend,
    legend: {orientation: 'h', traceorder: 'normal', x: 1, xanchor: 'right', y: 1, yanchor: 'bottom', font: {size: 11, color: paint.muted}, bgcolor: 'rgba(0,0,0,0)'},
    xaxis: {...axis, type: logX ? 'log' : 'linear', range: logX ? [low, high].map(Math.log10) : [low, high], tickformat: high < 1e5 ? ',~g' : '~s', hoverformat: ',.10~g', ...(logX && {tickvals: decades(low, high)}),
      title: {text: chart.x, standoff: 4, font: {size: 11}}, showspikes: true, spikemode: 'across', spikethickness: 1, spikecolor: paint.muted, spikedash: 'solid', automargin: false,
      ...(chart.ticks.length && {tickvals: chart.ticks.map(each => each[0]), ticktext: chart.ticks.map(each => each[1])})},
    yaxis: {...axis, ...FORMATS[chart.kind], ...(chart.kind === 'number' && Math.max(...values) < 1e-3 && {tickformat: '.2~e'}), type: logY ? 'log' : 'linear', range: rangeY, fixedrange: true, nticks: 6, automargin: false, ...(logY && {tickvals: decadesY, ticktext: decadesY.map(y => figure(chart, y))})},
    shapes: [
      ...chart.rules.map(([y]) => ({type: 'line', xref: 'paper', x0: 0, x1: 1, y0: y * scale, y1: y * scale, line: {color: paint.muted, width: 1, dash: 'dot'}})),
      ...marks.map(([x, , , colour]) => ({type: 'line', x0: x, x1: x, yref: 'paper', y0: 0, y1: 1, line: {color: paint[`c${colour}`] ?? paint.ink, width: 1, dash: 'dot'}})),
    ],
    annotations: [...rules, ...marks.map(([x, text, name, colour]) => ({...label, text: `⚠${plain(name)}`, hovertext: plain(text), captureevents: true, x: logX ? Math.log10(x) : x, yref: 'paper', y: 1, yanchor: 'bottom', yshift: -14, font: {size: 11, color: paint[`c${colour}`] ?? paint.ink}, bgcolor: faded(paint.surface, 0.7)})),
      ...(values.length ? [] : [{...label, text: 'No values here', xref: 'paper', yref: 'paper', x: 0.5, y: 0.5}])],
  };
  await Plotly.react(div, traces, layout, {displayModeBar: false, doubleClick: false});
  if (!div.dataset.drawn) listen(div);
  div.dataset.drawn = 'yes';
}
function plain(text) { return text.replace(/&/g, '&amp;').replace(/</g, '&lt;'); }  // Plotly reads some tags
function figure(chart, y) {
  const [value, unit] = chart.kind !== 'seconds' ? [y, FORMATS[chart.kind].ticksuffix ?? ''] : y < 1 ? [1000 * y, ' ms'] : [y, ' s'];
  return `${Number(value.toPrecision(3))}${unit}`;
}
function decades(low, high) {  // ticks of a logarithmic axis: powers of ten, with 2 and 5 in between if there are few
  const [first, last] = [low, high].map(value => Math.floor(Math.log10(value))), tickvals = [];
  for (let power = first; power <= last; power++) for (const factor of last - first > 2 ? [1] : [1, 2, 5]) tickvals.push(factor * 10 ** power);
  return tickvals;
}
function upright(chart, values, log) {
  if (log) {
    const known = values.filter(y => y > 0), low = Math.min(...known), high = Math.max(...known);
    if (!known.length) return [0, 1];
    const ticks = decades(low, 10 * high);  // from the tick below all values to the one above
    return [ticks.findLast(tick => tick <= low * 1.001), ticks.find(tick => tick >= high * 0.999 && tick > low * 1.001)].map(Math.log10);
  }
  const low = Math.min(0, ...values), high = Math.max(0, ...values);
  if (chart.stacked || (chart.kind === 'share' && low >= 0 && high > 40 && high <= 100)) return [0, 100];
  const room = (high - low || 1) * 0.05;
  return [low < 0 ? low - room : 0, high > 0 ? high + room : low < 0 ? 0 : 1];
}

// --- what readers do ---
const xyz = div => charts.get(div)?.x;
const others = div => [...inSight].filter(other => other !== div && other.dataset.drawn && xyz(other) === xyz(div));
function listen(div) {
  div.on('plotly_relayout', change => {
    if (!('xaxis.range[0]' in change)) return;
    const edges = [change['xaxis.range[0]'], change['xaxis.range[1]']];
    zoom(...edges.map(x => Number((div.layout.xaxis.type === 'log' ? 10 ** x : x).toPrecision(4))));
  });
  div.on('plotly_doubleclick', () => { zoom(null, null); return false; });
  div.on('plotly_legendclick', ({curveNumber}) => {
    const {name} = div.data[curveNumber];
    view.hidden[view.hidden.has(name) ? 'delete' : 'add'](name);
    changed();
    return false;
  });
  div.on('plotly_legenddoubleclick', () => false);
  let telling = false;
  div.on('plotly_hover', ({xvals: [x]}) => {
    if (telling) return;
    telling = true;
    others(div).forEach(other => Plotly.Fx.hover(other, {xval: x}, 'xy', true));
    telling = false;
  });
  div.on('plotly_unhover', () => others(div).forEach(other => Plotly.Fx.unhover(other)));
  let at = Infinity;
  div.addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], xs = charts.get(div).lines[0].points[0];
    if (!move) return;
    event.preventDefault();
    at = Math.max(0, Math.min(xs.length - 1, (at === Infinity ? xs.length : at) + move));
    Plotly.Fx.hover(div, {xval: xs[at]}, 'xy');
  });
  div.addEventListener('blur', () => Plotly.Fx.unhover(div));
}
function zoom(from, to) { [view.from, view.to] = [from, to]; changed(); }
function viewed(query) {  // writes the settings into a query
  for (const name of ['smooth', 'log', 'from', 'to', 'hide']) query.delete(name);
  if (view.smooth !== 'light') query.set('smooth', view.smooth);
  for (const name of ['from', 'to']) if (view[name] !== null) query.set(name, view[name]);
  view.log.forEach(axis => query.append('log', axis));
  view.hidden.forEach(label => query.append('hide', label));
  return query;
}
function changed() {
  fill();
  const query = viewed(new URLSearchParams(location.search)).toString();
  history.replaceState(null, '', location.pathname + (query && `?${query}`) + location.hash);
  redraw();
}
function fill() {  // shows the settings in the page's form
  const form = document.getElementById('view');
  if (!form) return;
  for (const name of ['from', 'to']) form.elements[name].value = view[name] ?? '';
  form.elements.smooth.value = view.smooth;
  for (const box of form.querySelectorAll('[name=log]')) box.checked = view.log.has(box.value);
}
document.addEventListener('change', ({target}) => {
  const form = target.closest('#view');
  if (!form) return;
  view.smooth = form.elements.smooth.value;
  view.log = new Set(new FormData(form).getAll('log'));
  [view.from, view.to] = ['from', 'to'].map(name => edge(form.elements[name].value));
  changed();
});
document.addEventListener('submit', event => event.target.id === 'view' && event.preventDefault());
document.addEventListener('click', event => {
  const kind = event.target.dataset?.save;
  if (event.target.matches?.('[data-reset]')) { view.hidden.clear(); zoom(null, null); }
  if (!kind) return;
  const rows = [...charts.values()].flatMap(chart => chart.lines.flatMap(line => line.points[0].map((x, at) => ({chart: chart.title, line: line.label, x: chart.x, at: x, value: line.points[1][at]}))));
  const quoted = value => typeof value === 'number' ? value : `"${value.replace(/"/g, '""')}"`;
  const text = kind === 'json' ? JSON.stringify(rows) : ['chart,line,x,at,value', ...rows.map(row => Object.values(row).map(quoted).join())].join('\n');
  const link = Object.assign(document.createElement('a'), {download: `curves.${kind}`, href: URL.createObjectURL(new Blob([text], {type: kind === 'json' ? 'application/json' : 'text/csv'}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
fill();
readable(document);
return {readable, viewed};
})();
