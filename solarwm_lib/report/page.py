"""The frame of the gallery page: style, script, content security policy. One file, no network, light and dark."""

from __future__ import annotations

from html import escape

# Inline content only: whatever ends up in the page, a browser fetches nothing for it.
POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a2030;--soft:#576074;--rule:#dde1e9;--accent:#2f5fd0;
--good:#11734b;--bad:#b3261e;--s0:#2f5fd0;--s1:#d9612c;--s2:#1f8f6b;--s3:#8a4fc9;--s4:#b8860b;--s5:#c2347f}
@media (prefers-color-scheme:dark){:root{--bg:#10141b;--card:#191f29;--ink:#e9edf5;--soft:#9aa6ba;--rule:#2c3545;
--accent:#8fb1ff;--good:#5fd0a0;--bad:#ff8a80;--s0:#8fb1ff;--s1:#ff9d6e;--s2:#5fd0a0;--s3:#c79bff;--s4:#f0c75e;--s5:#ff8fc4}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
a{color:var(--accent)}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:12px;top:12px;background:var(--card);padding:8px 12px;z-index:2}
header,main,footer{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:40px}
h1{font-size:2.1rem;line-height:1.2;margin:0 0 4px;letter-spacing:-.02em}
h2{font-size:1.5rem;margin:48px 0 8px;letter-spacing:-.01em}
h3{font-size:1.12rem;margin:24px 0 8px}
h4{font-size:1rem;margin:18px 0 6px}
h5,h6{font-size:.94rem;margin:16px 0 6px}
.lead,.note,footer{color:var(--soft)}
.note{font-size:.9rem;margin:4px 0 12px}
nav ul{display:flex;flex-wrap:wrap;gap:6px 18px;list-style:none;padding:0;margin:16px 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:18px 0;padding:0;list-style:none}
.tile,.card{background:var(--card);border:1px solid var(--rule);border-radius:12px}
.tile{padding:12px 16px}
.tile b{display:block;font-size:1.45rem;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.tile span{color:var(--soft);font-size:.86rem}
.tile.good b{color:var(--good)}.tile.bad b{color:var(--bad)}
.card{padding:8px 20px 20px;margin:16px 0}
.clips{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,540px),1fr));gap:16px;margin:12px 0}
figure{margin:0}
figcaption{color:var(--soft);font-size:.9rem;padding:4px 0}
video,img.wide{display:block;width:100%;height:auto;border-radius:8px;background:#000}
img.wide{background:#fff;max-width:760px}
button{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:6px 14px;cursor:pointer}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;min-width:100%}
caption{text-align:left;color:var(--soft);padding:4px 0}
th,td{padding:5px 12px 5px 0;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;color:var(--soft);white-space:nowrap}
td.number{font-variant-numeric:tabular-nums;white-space:nowrap}
td:last-child:not(.number){min-width:26ch}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,monospace;background:color-mix(in srgb,var(--soft) 14%,transparent);padding:1px 5px;border-radius:5px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:16px}
.chart svg{width:100%;height:auto}
.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}
.chart .grid{stroke:var(--rule);stroke-width:1}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round}
.series-0{stroke:var(--s0);color:var(--s0)}.series-1{stroke:var(--s1);color:var(--s1)}.series-2{stroke:var(--s2);color:var(--s2)}
.series-3{stroke:var(--s3);color:var(--s3)}.series-4{stroke:var(--s4);color:var(--s4)}.series-5{stroke:var(--s5);color:var(--s5)}
.dots{fill:currentColor;stroke:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;padding:0;margin:2px 0;font-size:.86rem}
.legend li::before{content:"";display:inline-block;width:14px;height:3px;background:currentColor;margin-right:6px;vertical-align:middle}
details{margin:14px 0}
summary{cursor:pointer;font-weight:600}
.graph{overflow-x:auto}.graph svg{max-width:100%;height:auto}
.tag{border-radius:99px;padding:1px 9px;font-size:.82rem;border:1px solid currentColor}
.tag.good{color:var(--good)}.tag.bad{color:var(--bad)}
footer{padding:40px 24px;font-size:.9rem}
@media print{button,nav{display:none}}
"""

SCRIPT = """
for (const button of document.querySelectorAll('button[data-play]')) {
  button.hidden = false;
  button.addEventListener('click', () => {
    const videos = [...document.querySelectorAll('#' + button.dataset.play + ' video')];
    const start = button.getAttribute('aria-pressed') !== 'true';
    button.setAttribute('aria-pressed', String(start));
    button.textContent = start ? 'Pause all' : 'Play all';
    for (const video of videos) {
      if (start) { video.currentTime = 0; video.play(); } else { video.pause(); }
    }
  });
}
"""


def render(title: str, lead: str, sections: list[tuple[str, str, str]]) -> str:
    """Return the page of (anchor, heading, body HTML) sections. `lead` is HTML, `title` plain text."""
    links = "".join(f'<li><a href="#{anchor}">{escape(heading)}</a></li>' for anchor, heading, _ in sections)
    body = "".join(
        f'<section id="{anchor}" aria-labelledby="{anchor}-h"><h2 id="{anchor}-h">{escape(heading)}</h2>{html}</section>'
        for anchor, heading, html in sections
    )
    return (
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n'
            '<a class="skip" href="#content">Skip to content</a>\n'
            f'<header><h1>{escape(title)}</h1>{lead}<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
            f'<main id="content">{body}</main>\n'
            "<footer>Made from the artifacts under the results folder; `solarwm verify` and `solarwm lineage` check and trace "
            f"each of them. This page is one file and loads nothing.</footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
        )
        .replace("`solarwm verify`", "<code>solarwm verify</code>")
        .replace("`solarwm lineage`", "<code>solarwm lineage</code>")
    )


def play_button(anchor: str) -> str:
    """A button that starts and stops every video inside the element `anchor`; hidden where scripts are off."""
    return f'<p><button type="button" hidden data-play="{anchor}" aria-pressed="false">Play all</button></p>'


def tile(value: str, label: str, tone: str = "") -> str:
    return f'<li class="tile {tone}"><b>{escape(value)}</b><span>{escape(label)}</span></li>'
