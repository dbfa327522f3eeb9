"""The page of a comparison, as a Jinja template: no script, nothing that is loaded from elsewhere."""

# The markers of the plots, in a box from -5 to 5.
MARKERS = [
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M-4-4h8v8h-8z",
    "M0-5L5 4H-5z",
    "M0-5L5 0L0 5L-5 0z",
    "M0 5L5-4H-5z",
    "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
    "M-5-3l2-2l3 3l3-3l2 2l-3 3l3 3l-2 2l-3-3l-3 3l-2-2l3-3z",
]

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>Comparison of runs</title>
<style>
:root { --ground: #ffffff; --ink: #1d2125; --soft: #5b6570; --line: #dde2e7; --grid: #e3e7eb; --card: #f7f8fa;
{% for i, color in light %} --run-{{ i }}: {{ color }};{% endfor %} }
@media (prefers-color-scheme: dark) {
:root { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa5b0; --line: #333a41; --grid: #2d343a; --card: #1b1f23;
{% for i, color in dark %} --run-{{ i }}: {{ color }};{% endfor %} } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; }
p { margin: .4rem 0; max-width: 52rem; } .soft, figcaption { color: var(--soft); font-size: .86rem; }
.note { border-left: 3px solid var(--run-1); padding-left: .7rem; overflow-wrap: anywhere; }
.legend { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: .5rem 0;
  margin: .8rem 0; background: var(--ground); border-bottom: 1px solid var(--line); list-style: none; }
.legend li { overflow-wrap: anywhere; }
svg.key { fill: var(--run); stroke: var(--run); width: 26px; height: 12px; vertical-align: -1px; margin-right: .35rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--ground);
  max-width: 46vw; overflow: hidden; text-overflow: ellipsis; }
tr.delta td { border-top: 0; color: var(--soft); padding-top: 0; font-size: .82rem; }
tr.delta td.strong { color: var(--ink); font-weight: 700; }
td:first-child .bar { display: inline-block; width: .28rem; height: 1em; margin-right: .5rem; vertical-align: -.12em;
  border-radius: 2px; }
.text th, .text td { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: .9rem; }
.plots figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; background: var(--card); }
.plots svg { width: 100%; height: auto; display: block; }
.plots svg text { fill: var(--ink) !important; font-family: inherit !important; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; font-weight: 600; } pre { overflow-x: auto; font-size: .82rem; }
</style>
</head>
<body>
{% macro show(table, text=False) %}
<div class="scroll{{ ' text' if text }}"><table>
<thead><tr>{% for title in table.columns %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr{{ ' class=delta' if row.group is none and not text }}>
{% for cell in row.cells %}
<td{{ ' class=strong' if loop.index0 in row.strong }}>
{%- if loop.first and row.group is not none -%}
<span class="bar" style="background: var(--run-{{ row.group % colors }})"></span>
{%- endif -%}
{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% if table.caption %}<p class="soft">{{ table.caption }}</p>{% endif %}
{% endmacro %}
<h1>Comparison of runs</h1>
<p class="soft">{{ headline }}</p>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
<h2>{{ first.title }}</h2>
{{ show(first) }}
<ul class="legend">
{% for group in groups %}
<li style="--run: var(--run-{{ group.color }})"><svg class="key" viewBox="-13 -6 26 12" aria-hidden="true">
<path d="M-13 0H13" stroke-width="2" stroke-dasharray="{{ group.dashes }}"/>
<path d="{{ markers[group.marker] }}" stroke="none"/></svg>{{ group.label }}</li>
{% endfor %}
</ul>
{% for title, figures in sections.items() %}
<h2>{{ title }}</h2>
<div class="plots">
{% for figure in figures %}<figure role="img" aria-label="{{ figure.title }}">{{ figure.svg }}</figure>
{% endfor %}
</div>
{% endfor %}
{% for table in others %}
<h2>{{ table.title }}</h2>
{{ show(table) }}
{% endfor %}
<h2>Settings and runs</h2>
{% for table in folded %}
<details{{ ' open' if loop.first }}><summary>{{ table.title }}</summary>{{ show(table, True) }}</details>
{% endfor %}
{% for recipe in recipes %}
<details><summary>All settings of {{ recipe.label }}</summary><pre>{{ recipe.text }}</pre></details>
{% endfor %}
<details><summary>How this was computed</summary><ul>
{% for line in method %}<li>{{ line }}</li>{% endfor %}
</ul></details>
<p class="soft">{{ footer }}{% if versions %}; the runs: {{ versions }}{% endif %}</p>
</body>
</html>
"""
