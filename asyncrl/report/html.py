"""The page of the report: style, script and sections in one text.

Called by `asyncrl.report.write_report`. Guarantees:
1. one self-contained file: no network, no fonts, no script from elsewhere (a Content-Security-Policy says so too);
2. light and dark follow the reader's system; without JavaScript only the tooltips are missing;
3. nothing from the run reaches the page unescaped.
"""

from __future__ import annotations

import time
from html import escape

from asyncrl import __version__
from asyncrl.report import bias, evaluation, sections
from asyncrl.report.data import RunData

STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#16181d;--soft:#5d636e;--edge:#e3e3df;--grid:#ececea;
--s1:#2a78d6;--s2:#eb6834;--s3:#1a9e70;--s4:#d99a00;--s5:#6d55c9;--s6:#d03f3e;--s7:#7b8794;--s8:#0f8fa8;--good:#177a4c;
--bad:#b3261e;--open:#8a6100}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1d2025;--ink:#eceef1;--soft:#a2a8b3;--edge:#30343b;
--grid:#2a2e35;--s1:#5a9ff0;--s2:#f08a5d;--s3:#3fc794;--s4:#e5b53c;--s5:#a493f0;--s6:#f07170;--s7:#9aa5b1;--s8:#4cc3d9;--good:#5fd39b;
--bad:#ff8a80;--open:#e5b53c}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,sans-serif}main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0;letter-spacing:-.01em}h2{font-size:15px;margin:0 0 4px}
.sub{color:var(--soft);margin:2px 0 16px}
.verdict{margin:0 0 14px;padding:10px 14px;border-radius:8px;background:var(--card);
border:1px solid var(--edge);border-left:4px solid var(--open)}.verdict b{margin-right:8px}
.verdict.good{border-left-color:var(--good)}
.verdict.good b{color:var(--good)}.verdict.bad{border-left-color:var(--bad)}.verdict.bad b{color:var(--bad)}
.verdict.open b{color:var(--open)}.violations{color:var(--bad);margin:0 0 14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:10px;margin-bottom:16px}
.tile,.card{background:var(--card);border:1px solid var(--edge);border-radius:10px}
.tile{padding:12px;display:flex;flex-direction:column}.tile b{font-weight:500;color:var(--soft);font-size:12px}
.tile strong{font-size:17px;font-weight:600;letter-spacing:-.02em;white-space:nowrap}
.tile small{color:var(--soft);font-size:12px}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}.card{padding:16px 18px;min-width:0}
.card.full{grid-column:1/-1}@media(max-width:820px){.cards{grid-template-columns:minmax(0,1fr)}}
.note,.none{color:var(--soft);font-size:12.5px;margin:0 0 8px}.small{display:grid;gap:10px 18px;
grid-template-columns:repeat(auto-fill,minmax(240px,1fr))}figure{margin:0}figcaption{font-size:12.5px;color:var(--soft)}
svg{width:100%;height:auto;display:block;overflow:visible}.grid{stroke:var(--grid)}
.tick{font-size:11px;fill:var(--soft)}
.small .tick{font-size:13px}.mid{text-anchor:middle}.end{text-anchor:end}
.value{font-size:11px;fill:var(--ink);text-anchor:middle}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4;stroke-width:1.4}
.band{fill:var(--c);opacity:.13}.area{fill:var(--c);opacity:.82;stroke:var(--card);stroke-width:.6}.bar{fill:var(--c)}
.dot{fill:var(--c)}.limit{stroke:var(--s6);stroke-dasharray:5 4}.limit-text{
fill:var(--s6);font-size:11px;text-anchor:end}
.lane{fill:var(--grid)}.busy{fill:var(--s1)}.rule{stroke:var(--soft);stroke-dasharray:2 3}
.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}.s6{--c:var(--s6)}.s7{--c:var(--s7)}.s8{--c:var(--s8)}
.legend{margin:0 0 4px;font-size:12.5px;color:var(--soft)}.legend span{margin-right:14px;white-space:nowrap}
.key{display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);margin-right:5px}
.scroll{overflow:auto;max-height:440px}table{border-collapse:collapse;width:100%;font-size:13px}
th{position:sticky;top:0;background:var(--card);text-align:left;font-weight:500;color:var(--soft);
padding:4px 10px 4px 0;border-bottom:1px solid var(--edge)}
td{padding:4px 10px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top;
overflow-wrap:anywhere}.number{font-variant-numeric:tabular-nums}.changed{color:var(--s1);font-weight:500}
.usual{color:var(--soft)}td.short{white-space:nowrap;padding-right:14px}
pre{margin:0;font:12px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--soft);margin:10px 0 6px}
#tip{position:fixed;display:none;pointer-events:none;z-index:9;
background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:6px 10px;font-size:12.5px;
box-shadow:0 4px 18px rgb(0 0 0/.14)}#tip b{display:block;font-weight:500;color:var(--soft)}
"""

SCRIPT = """
const tip=document.getElementById('tip');
const text=(tag,words)=>{const e=document.createElement(tag);e.textContent=words;return e};
for(const svg of document.querySelectorAll('[data-chart]')){
 const c=JSON.parse(svg.dataset.chart),rule=svg.querySelector('.rule');
 svg.addEventListener('pointermove',e=>{
  const box=svg.getBoundingClientRect(),px=(e.clientX-box.left)/box.width*svg.viewBox.baseVal.width;
  const at=c.x0+(px-c.left)/(c.right-c.left)*(c.x1-c.x0);let best=null;
  for(const l of c.lines)for(const p of l.points)if(best===null||Math.abs(p[0]-at)<Math.abs(best-at))best=p[0];
  if(best===null)return;
  const x=c.left+(best-c.x0)/((c.x1-c.x0)||1)*(c.right-c.left);
  rule.setAttribute('x1',x);rule.setAttribute('x2',x);rule.setAttribute('visibility','visible');
  tip.replaceChildren(text('b',String(+best.toPrecision(6))));
  for(const l of c.lines){const p=l.points.find(q=>q[0]===best);if(!p)continue;
   const row=document.createElement('div'),key=document.createElement('i');key.className='key '+l.colour;
   row.append(key,l.name+' '+(+p[1].toPrecision(4)));tip.append(row)}
  tip.style.display='block';
  tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=(e.clientY+14)+'px'});
 svg.addEventListener('pointerleave',()=>{tip.style.display='none';rule.setAttribute('visibility','hidden')})}
"""


def page(data: RunData) -> str:
    """The whole report."""
    name = data.config.run.name if data.config else data.run.root.name
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    cards = [
        sections.learning(data), evaluation.section(data), sections.staleness(data), sections.utilisation(data),
        sections.queue(data),
        sections.weights(data), sections.throughput(data), sections.ledger(data), bias.lengths(data),
        sections.processes(data),
        sections.faults(data), sections.versions(data), sections.samples(data), sections.configuration(data),
    ]  # fmt: skip
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)} · asyncrl</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(name)}</h1><p class="sub">{escape(str(data.run.root))} · asyncrl {escape(__version__)} · '
        f"written {written}</p>{sections.verdict(data)}"
        f'<div class="cards">{"".join(cards)}</div></main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )
