"""How a scaling page looks: quiet, light or dark as the reader's system is, readable from 400 pixels on."""

STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #22252a; --quiet: #666b73; --line: #e3e4e0; --track: #eeefeb;
  --accent: #2f5d8a; --second: #c06a14; --mark: #22252a;
  --input: #8a68b4; --forward: #2b6cb3; --backward: #72aee0; --exchange: #de8a26; --update: #4a9a5c;
  --waiting: #c9504e; --other: #a7abb1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1b1e22; --ink: #e5e7ea; --quiet: #9ba1a9; --line: #2d3137; --track: #24282d;
    --accent: #5f9bd0; --second: #eb9f4c; --mark: #e5e7ea;
    --input: #b398dc; --forward: #5d9fe4; --backward: #37689d; --exchange: #eb9f4c; --update: #6cbb7c;
    --waiting: #e47977; --other: #737981;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 80rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 3rem 0 .4rem; }
h3 { font-size: .95rem; margin: 1.75rem 0 .5rem; }
p { margin: .3rem 0 1rem; max-width: 46rem; }
.quiet, figcaption, dt { color: var(--quiet); }
.small { font-size: .875rem; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10rem), 1fr)); gap: .75rem; }
.cards { margin: 1.75rem 0 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.cards b { display: block; font-size: 1.7rem; font-weight: 600; line-height: 1.25; }
.cards b, .bar .value, td { font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { padding: .5rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--quiet); font-weight: 500; font-size: .8rem; }
tbody th { font-weight: 500; }
th.words, td.words { text-align: left; }
th:first-child { position: sticky; left: 0; background: var(--card); }
figure { margin: 1rem 0 0; }
.bar { display: grid; grid-template-columns: 13.5rem 1fr 6rem; gap: .75rem; align-items: center; margin: .4rem 0; }
.bar .label { font-size: .875rem; }
.bar .value { font-size: .875rem; text-align: right; }
.track { position: relative; display: flex; height: 1.15rem; background: var(--track); border-radius: .2rem; }
.fill { background: var(--accent); border-radius: .2rem; }
.track > span:first-child { border-radius: .2rem 0 0 .2rem; }
.ideal-mark { position: absolute; top: -.2rem; bottom: -.2rem; width: 2px; margin-left: -1px; background: var(--mark); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .75rem 0 .25rem; padding: 0; list-style: none; }
.legend { font-size: .8125rem; color: var(--quiet); }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem; margin-right: .4rem; }
.legend i { vertical-align: -.05rem; }
.legend i.line { height: 0; width: 1.3rem; border-top: 2px solid; border-radius: 0; vertical-align: .25rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { font-size: 12px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2; }
svg .ideal polyline { stroke: var(--quiet); stroke-dasharray: 3 4; }
svg .same polyline { stroke: var(--accent); }
svg .times polyline { stroke: var(--second); }
.legend i.line.ideal { border-color: var(--quiet); border-top-style: dashed; }
.legend i.line.same { border-color: var(--accent); }
.legend i.line.times { border-color: var(--second); }
svg .same circle { fill: var(--accent); }
svg .times circle { fill: var(--second); }
svg .ideal circle { display: none; }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .35rem 1rem; margin: .75rem 0 0; font-size: .875rem; }
dd { margin: 0; max-width: 46rem; overflow-wrap: anywhere; }
pre { margin: .75rem 0 0; padding: .7rem .9rem; background: var(--card); border: 1px solid var(--line); }
pre { border-radius: .5rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; }
@media (max-width: 44rem) {
  main { padding: 1.5rem 1rem 3rem; }
  svg text { font-size: 16px; }
  .bar { grid-template-columns: 1fr auto; gap: .1rem .75rem; margin: .7rem 0; }
  .bar .track { grid-column: 1 / -1; grid-row: 2; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .6rem; }
}
"""
