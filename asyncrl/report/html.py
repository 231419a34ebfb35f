"""HTML building blocks of the chapters: boxes, tables, numbers as text.

Guarantee: titles, notes and table heads are escaped here; bodies and cells are HTML, and their authors escape text of
the run.
The style sheet and the script load nothing from elsewhere; light and dark follow the reader's system.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def card(title: str, body: str, *, note: str = "", wide: bool = False) -> str:
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card{" full" if wide else ""}"><h3>{escape(title)}</h3>{below}{body}</section>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, classes: Sequence[str] = ()) -> str:
    """A table; cells are HTML."""
    cells = list(rows)
    if not cells:
        return '<p class="none">none</p>'
    names = [*classes, *[""] * len(head)]
    body = "".join(
        "<tr>" + "".join(f'<td class="{name}">{cell}</td>' for cell, name in zip(row, names, strict=False)) + "</tr>"
        for row in cells
    )
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="scroll" tabindex="0"><table><tr>{heads}</tr>{body}</table></div>'


def duration(seconds: float) -> str:
    """`2 h 03 min`, `4 min 12 s`, `38 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{seconds:.0f} s"


def clock(t: Any) -> str:
    """`14:03:59` of a wall time."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(float(t))) if isinstance(t, int | float) else "-"
    except (OverflowError, ValueError, OSError):  # of a damaged line
        return "-"


def seconds(value: float | None) -> str:
    """`0.53 s`, `12 s`, `-` of None."""
    return "-" if value is None else f"{value:.2f} s" if value < 10 else duration(value)


def clip(text: Any, limit: int = 600) -> str:
    """The text, truncated if it is very long."""
    whole = text if isinstance(text, str) else str(text)
    return whole if len(whole) <= limit else whole[:limit] + " …"


STYLE = """
:root{color-scheme:light dark;--bg:#f6f6f4;--card:#fff;--ink:#16181d;--soft:#59606b;--edge:#e2e2de;--grid:#ececea;
--s1:#2a78d6;--s2:#e0602a;--s3:#1a9e70;--s4:#c98a00;--s5:#6d55c9;--s6:#d03f3e;--s7:#7b8794;--s8:#0f8fa8;--good:#177a4c;
--bad:#b3261e;--open:#8a6100;--g1:#fff3c4;--g2:#ffd98a;--g3:#ffb07c;--g4:#ff8f8f}
@media(prefers-color-scheme:dark){:root{--bg:#131519;--card:#1c1f24;--ink:#eceef1;--soft:#a5abb6;--edge:#30343b;
--grid:#2a2e35;--s1:#5a9ff0;--s2:#f08a5d;--s3:#3fc794;--s4:#e5b53c;--s5:#a493f0;--s6:#f07170;--s7:#9aa5b1;--s8:#4cc3d9;
--good:#5fd39b;--bad:#ff8a80;--open:#e5b53c;--g1:#4a4420;--g2:#6b5316;--g3:#7d4420;--g4:#8c2f33}}
*{box-sizing:border-box}html{scroll-behavior:smooth;scroll-padding-top:14px}
body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.page{display:grid;grid-template-columns:190px minmax(0,1fr);max-width:1420px;margin:0 auto}
nav{position:sticky;top:0;align-self:start;max-height:100vh;overflow:auto;padding:32px 8px 20px 20px;font-size:13.5px}
nav a{display:block;padding:3px 10px;border-radius:7px;color:var(--soft);text-decoration:none}
nav a:hover,nav a:focus-visible,nav a.here{background:var(--card);color:var(--ink)}
nav a.bad::after{content:" \\2022";color:var(--bad)}
nav label{display:block;margin:18px 10px 0;color:var(--soft);font-size:12px}nav input{width:100%;accent-color:var(--s1)}
main{padding:28px 24px 60px;min-width:0}
h1{font-size:25px;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:19px;margin:34px 0 2px;letter-spacing:-.01em}h3{font-size:14.5px;margin:0 0 4px}
.lead,.sub{color:var(--soft);margin:0 0 12px;max-width:88ch}.sub{margin:2px 0 16px;overflow-wrap:anywhere}
.verdict{margin:0 0 14px;padding:11px 15px;border-radius:9px;background:var(--card);border:1px solid var(--edge);
border-left:5px solid var(--open)}.verdict b{margin-right:8px}.verdict.good{border-left-color:var(--good)}
.verdict.good b{color:var(--good)}.verdict.bad{border-left-color:var(--bad)}.verdict.bad b{color:var(--bad)}
.verdict.open b{color:var(--open)}.violations{color:var(--bad);margin:0 0 14px}
.tiles{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:10px;margin-bottom:6px}
.tile,.card{background:var(--card);border:1px solid var(--edge);border-radius:11px}
.tile{padding:11px 12px;display:flex;flex-direction:column}.tile b{font-weight:500;color:var(--soft);font-size:12px}
.tile strong{font-size:17px;font-weight:600;letter-spacing:-.02em;white-space:nowrap}
.tile small{color:var(--soft);font-size:12px;line-height:1.35}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}.card{padding:15px 17px;min-width:0}
.card.full{grid-column:1/-1}
.note,.none{color:var(--soft);font-size:12.5px;margin:0 0 8px;max-width:100ch}
.small{display:grid;gap:12px 20px;grid-template-columns:repeat(auto-fill,minmax(250px,1fr))}
figure{margin:0}figcaption{font-size:12.5px;color:var(--soft)}
svg{width:100%;height:auto;display:block;overflow:visible}.grid{stroke:var(--grid)}
.tick{font-size:11px;fill:var(--soft)}.small .tick{font-size:13px}.mid{text-anchor:middle}.end{text-anchor:end}
.value{font-size:11px;fill:var(--ink);text-anchor:middle}.name{font-size:12px;fill:var(--ink)}
.line{fill:none;stroke:var(--c);stroke-width:1.9;stroke-linejoin:round}.dashed{stroke-dasharray:5 4;stroke-width:1.4}
.raw{opacity:.28;stroke-width:1.1}
.band{fill:var(--c);opacity:.13}.area{fill:var(--c);opacity:.82;stroke:var(--card);stroke-width:.6}.bar{fill:var(--c)}
.ribbon{fill:var(--c);opacity:.35}.dot{fill:var(--c)}.limit{stroke:var(--s6);stroke-dasharray:5 4}
.limit-text{fill:var(--s6);font-size:11px;text-anchor:end}
.lane{fill:var(--grid)}.rule{stroke:var(--soft);stroke-dasharray:2 3}.mark{stroke:var(--c);stroke-width:2}
.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}.s6{--c:var(--s6)}
.s7{--c:var(--s7)}.s8{--c:var(--s8)}
.legend{margin:0 0 4px;font-size:12.5px;color:var(--soft)}.legend span{margin-right:14px;white-space:nowrap}
.key{display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);margin-right:5px}
.scroll{overflow:auto;max-height:460px}table{border-collapse:collapse;width:100%;font-size:13px}
th{position:sticky;top:0;background:var(--card);text-align:left;font-weight:500;color:var(--soft);
padding:4px 12px 4px 0;border-bottom:1px solid var(--edge);white-space:nowrap}
td{padding:4px 12px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top;overflow-wrap:anywhere}
.number{font-variant-numeric:tabular-nums}.changed{color:var(--s1);font-weight:500}
.usual{color:var(--soft)}td.short{white-space:nowrap;padding-right:14px}td.text{min-width:220px}
pre{margin:0;font:12px/1.55 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.g1,.g2,.g3,.g4{border-radius:2px}.g1{background:var(--g1)}.g2{background:var(--g2)}.g3{background:var(--g3)}
.g4{background:var(--g4)}.env{color:var(--soft)}
summary{cursor:pointer;color:var(--soft);margin:10px 0 6px}
#tip{position:fixed;display:none;pointer-events:none;z-index:9;background:var(--card);border:1px solid var(--edge);
border-radius:8px;padding:6px 10px;font-size:12.5px;box-shadow:0 4px 18px rgb(0 0 0/.16)}
#tip b{display:block;font-weight:500;color:var(--soft)}
@media(max-width:980px){.page{display:block}nav{position:static;max-height:none;white-space:nowrap;padding:14px 16px 0}
nav a{display:inline-block}nav label{display:inline-block;margin:0 10px;width:150px}main{padding:14px 16px 50px}
.cards{grid-template-columns:minmax(0,1fr)}}
@media(max-width:700px){.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.card{overflow-x:auto;padding:13px}.card.full>svg{min-width:640px}
.small{grid-template-columns:repeat(2,minmax(0,1fr))}td:not(.short,.number,.text){min-width:8em}}
@media print{nav,#tip{display:none}.page{display:block}.scroll{max-height:none;overflow:visible}
.card,.tile,.verdict{break-inside:avoid}h2{break-after:avoid}body{background:#fff}}
"""
SCRIPT = """
const tip=document.getElementById('tip');
const text=(tag,words)=>{const e=document.createElement(tag);e.textContent=words;return e};
const charts=[...document.querySelectorAll('[data-chart]')].map(svg=>({svg,c:JSON.parse(svg.dataset.chart)}));
const ema=(points,w)=>{let last=0,weight=0;return points.map(([x,y])=>{last=last*w+(1-w)*y;weight=weight*w+(1-w);
 return [x,last/weight]})};
const smooth=w=>{for(const {svg,c} of charts)for(const line of svg.querySelectorAll('[data-line]')){
 const of=c.lines[+line.dataset.line].points;
 const at=([x,y])=>(c.left+(x-c.x0)/((c.x1-c.x0)||1)*(c.right-c.left)).toFixed(1)+','+
  (c.bottom-(y-c.y0)/((c.y1-c.y0)||1)*(c.bottom-c.top)).toFixed(1);
 line.setAttribute('points',ema(of,w).map(at).join(' '))}};
const slider=document.getElementById('smoothing');
if(slider)slider.addEventListener('input',()=>smooth(+slider.value));
for(const {svg,c} of charts){
 const rule=svg.querySelector('.rule');
 svg.addEventListener('pointermove',e=>{
  const box=svg.getBoundingClientRect(),px=(e.clientX-box.left)/box.width*svg.viewBox.baseVal.width;
  const at=c.x0+(px-c.left)/(c.right-c.left)*(c.x1-c.x0);let best=null;
  for(const l of c.lines)for(const p of l.points)if(best===null||Math.abs(p[0]-at)<Math.abs(best-at))best=p[0];
  if(best===null)return;
  const x=c.left+(best-c.x0)/((c.x1-c.x0)||1)*(c.right-c.left);
  rule.setAttribute('x1',x);rule.setAttribute('x2',x);rule.setAttribute('visibility','visible');
  tip.replaceChildren(text('b',(c.label?c.label+' ':'')+(+best.toPrecision(6))));
  for(const l of c.lines){const p=l.points.find(q=>q[0]===best);if(!p)continue;
   const row=document.createElement('div'),key=document.createElement('i');key.className='key '+l.colour;
   row.append(key,l.name+' '+(+p[1].toPrecision(4)));tip.append(row)}
  tip.style.display='block';
  tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=(e.clientY+14)+'px'});
 svg.addEventListener('pointerleave',()=>{tip.style.display='none';rule.setAttribute('visibility','hidden')})}
const links=[...document.querySelectorAll('nav a')];
if('IntersectionObserver' in window){const seen=new IntersectionObserver(found=>{for(const f of found)
 if(f.isIntersecting)for(const a of links)a.classList.toggle('here',a.hash==='#'+f.target.id)},
 {rootMargin:'0px 0px -75% 0px'});for(const h of document.querySelectorAll('h2[id]'))seen.observe(h)}
"""
