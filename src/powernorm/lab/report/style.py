"""The style sheet of the report, light and dark, desktop and phone."""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d5dae0; --panel: #f5f7f9;
  --alarm: #b3261e; --best: #e8f3ec; --changed: #fff4d6; --grid: #dfe3e8; --link: #0b57d0;
  --series-0: #0072b2; --series-1: #c44e00; --series-2: #00805d; --series-3: #a8327d;
  --series-4: #8a6a00; --series-5: #2b8cbe; --series-6: #6b4fbb; --series-7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --ink: #e6e9ec; --soft: #a2abb5; --line: #3a4149; --panel: #1d2125;
    --alarm: #ff8a80; --best: #1b3327; --changed: #3a3115; --grid: #343b43; --link: #8ab4f8;
    --series-0: #58b2f0; --series-1: #ff9345; --series-2: #2fcf9f; --series-3: #ee8fcb;
    --series-4: #ecd050; --series-5: #9bd7f5; --series-6: #b7a3f7; --series-7: #b4bcc6;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p, dl, ul { max-width: 46rem; }
.lead, figcaption, caption, .soft { color: var(--soft); }
a { color: var(--link); }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
nav a { display: inline-block; padding: .35rem 0; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px; }
.scroll + .figures, .scroll + .scroll { margin-top: 1rem; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.scroll > table { min-width: 100%; }
caption { text-align: left; padding: .5rem .75rem; caption-side: top; }
.scroll caption span { position: sticky; left: .75rem; display: inline-block;
  max-width: min(44rem, calc(100vw - 4rem)); }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-top: 1px solid var(--line); }
thead th { background: var(--panel); border-top: 0; }
thead th, tbody th { font-weight: 600; }
tbody th { position: sticky; left: 0; width: 1%; background: var(--paper); }
.number { text-align: right; }
.wrap { white-space: normal; min-width: 9.5rem; overflow-wrap: anywhere; }
.wide { min-width: min(30rem, 70vw); }
wbr { display: none; }
@media (max-width: 40rem) { tbody th.long { white-space: normal; min-width: 10rem;
  max-width: 10rem; overflow-wrap: anywhere; } wbr { display: inline; } }
.baseline td, .baseline th { color: var(--soft); font-weight: 400; }
.best td, .best th { background: var(--best); }
.changed td, .changed th { background: var(--changed); }
.alarm { color: var(--alarm); font-weight: 600; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); font-size: .8rem; user-select: all; }
details { margin: .75rem 0; }
summary { cursor: pointer; padding: .35rem 0; color: var(--link); }
.verdict { padding: .6rem .8rem; border-left: 4px solid var(--series-1);
  background: var(--panel); }
.verdict.swap { border-color: var(--series-2); }
article + article { margin-top: 4rem; border-top: 2px solid var(--line); padding-top: 1rem; }
.soft code { overflow-wrap: anywhere; }
.conclusion { list-style: none; margin: 1rem 0; padding: .6rem .8rem; font-weight: 600;
  border-left: 4px solid var(--link); background: var(--panel); }
.reduced { padding: .6rem .8rem; border-left: 4px solid var(--series-1);
  background: var(--panel); }
.sample { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .75rem;
  max-width: none; margin: 0 0 1rem; }
.sample dt, .sample dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { .sample { grid-template-columns: 1fr; }
  .sample dt { margin-top: .35rem; } }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0 0 0 1rem; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }
figure { margin: 0; max-width: 31rem; min-width: 0; padding: .5rem;
  border: 1px solid var(--line); border-radius: 6px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .85rem; padding: .25rem .25rem 0; }
@media print { .scroll, pre { overflow: visible; } nav { display: none; } }
"""

SERIES: Final = (
    "#0072b2",
    "#c44e00",
    "#00805d",
    "#a8327d",
    "#8a6a00",
    "#2b8cbe",
    "#6b4fbb",
    "#6b7280",
)
"""Line colours: Okabe and Ito's palette, darkened where it has too little contrast on white."""
