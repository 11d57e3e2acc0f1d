"""The scaling page as a Jinja template. It asks for nothing: no script, no font, no picture from anywhere."""

TEMPLATE = """\
{% macro table(caption, headings, rows) -%}
<div class="scroll" tabindex="0" role="region" aria-label="{{ caption }}">
<table>
<thead><tr>
{%- for heading in headings %}
<th scope="col"{{ ' class=words' if heading in text_columns }}>{{ heading }}</th>
{%- endfor %}
</tr></thead>
<tbody>
{%- for row in rows %}
<tr><th scope="row" class="words">{{ row[0] }}</th>
{%- for cell in row[1:] %}
<td{{ ' class=words' if headings[loop.index] in text_columns }}>{{ cell }}</td>
{%- endfor %}
</tr>
{%- endfor %}
</tbody>
</table>
</div>
{%- endmacro %}
{% macro bars(rows) -%}
{%- for bar in rows %}
<div class="bar"><span class="label">{{ bar.label }}</span>
<span class="track"><span class="fill" style="width:{{ '%.2f' % bar.percent }}%"></span>
{%- if bar.ideal_percent is not none %}<span class="ideal-mark" style="left:{{ '%.2f' % bar.ideal_percent }}%"></span>
{%- endif %}</span>
<span class="value">{{ bar.value }}</span></div>
{%- endfor %}
{%- endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>Scaling of {{ result.recipe }}, {{ result.date }}</title>
<style>
{{ style|safe }}</style>
</head>
<body>
<main>
<header>
<h1>Scaling of {{ result.recipe }}</h1>
<p class="quiet">{{ result.title }}. {{ result.date }}, {{ result.machine.processor }},
{{ result.machine.cores }} CPU cores.</p>
<ul class="cards">
{%- for row in replicated %}
<li><span class="small quiet">{{ row.configuration.name }}</span>
<b>{{ '%.2f' % row.speed_up }}×</b>
<span class="small quiet">as fast as 1 device; {{ '%.0f' % (100 * row.efficiency) }}% efficient on
{{ row.configuration.resource }}</span></li>
{%- endfor %}
</ul>
</header>

<section aria-labelledby="speed">
<h2 id="speed">Speed</h2>
{{ table('Speed of each configuration', row_headings, row_cells) }}
{%- if plot %}
<h3>Speed-up over the number of replicas</h3>
<figure id="plot-speed-up">
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="Speed-up over the number of replicas">
{%- for y, number in plot.y_ticks %}
<line class="grid" x1="{{ plot.left }}" x2="{{ plot.right }}" y1="{{ '%.1f' % y }}" y2="{{ '%.1f' % y }}"/>
<text x="{{ plot.left - 8 }}" y="{{ '%.1f' % (y + 4) }}" text-anchor="end">{{ number }}</text>
{%- endfor %}
{%- for x, number in plot.x_ticks %}
<text x="{{ '%.1f' % x }}" y="{{ plot.bottom + 18 }}" text-anchor="middle">{{ number }}</text>
{%- endfor %}
<text x="{{ (plot.left + plot.right) / 2 }}" y="{{ plot.bottom + 36 }}" text-anchor="middle">replicas</text>
{%- for curve in plot.curves %}
<g class="{{ curve.kind }}"><polyline points="{{ curve.path }}"/>
{%- for x, y, words in curve.points %}
<circle cx="{{ '%.1f' % x }}" cy="{{ '%.1f' % y }}" r="3.5"><title>{{ words }}</title></circle>
{%- endfor %}
</g>
{%- endfor %}
</svg>
<ul class="legend">
{%- for curve in plot.curves %}<li><i class="line {{ curve.kind }}"></i>{{ curve.name }}</li>{% endfor -%}
</ul>
</figure>
{%- endif %}
<h3>Examples a second</h3>
<figure id="plot-throughput">{{ bars(throughput) }}
<figcaption class="small">The line marks what as much hardware could give: 1 device's examples a second, times the
hardware.</figcaption></figure>
<h3>Seconds an epoch{{ ', extrapolated where the table says so' if extrapolated }}</h3>
<figure id="plot-epoch">{{ bars(epochs) }}</figure>
</section>

<section aria-labelledby="parts">
<h2 id="parts">Where the time of a step goes</h2>
<p class="small quiet">Milliseconds of the mean step, mean over the replicas. All bars have one scale.</p>
<figure id="plot-parts">
<ul class="legend">
{%- for part in parts %}<li><i style="background:var(--{{ part }})"></i>{{ part }}</li>{% endfor -%}
</ul>
{%- for stack in stacks %}
<div class="bar"><span class="label">{{ stack.label }}</span>
<span class="track">
{%- for piece in stack.pieces %}<span style="width:{{ '%.3f' % piece.percent }}%;background:var(--{{ piece.part }})"
title="{{ piece.part }}: {{ '%.1f' % piece.ms }} ms, {{ '%.0f' % (100 * piece.share) }}%"></span>{% endfor -%}
</span>
<span class="value">{{ stack.value }}</span></div>
{%- endfor %}
</figure>
<h3>In milliseconds</h3>
{{ table('Parts of a step in milliseconds', part_headings, part_cells) }}
</section>

<section aria-labelledby="how">
<h2 id="how">How it was measured</h2>
<dl>
{%- for name, said in facts %}
<dt>{{ name }}</dt><dd>{{ said }}</dd>
{%- endfor %}
</dl>
<pre><code>{{ result.command }}</code></pre>
</section>

<section aria-labelledby="words">
<h2 id="words">What the rows and columns mean</h2>
<dl>
{%- for name, said in definitions %}
<dt>{{ name }}</dt><dd>{{ said }}</dd>
{%- endfor %}
</dl>
</section>
{%- if published %}

<section aria-labelledby="published">
<h2 id="published">{{ published_title }}</h2>
<p class="small quiet">{{ published_note }}</p>
{{ table(published_title, published_headings, published) }}
</section>
{%- endif %}
</main>
</body>
</html>
"""
