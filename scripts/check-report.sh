#!/usr/bin/env bash
# Opens a page of `flashcore report` in headless Chromium: no console errors, the charts that are expected, under 3 MB,
# a screenshot that is not empty, and nothing wider than a phone.
# Usage: scripts/check-report.sh PAGE LEAST_CHARTS SCREENSHOT
set -euo pipefail
cd "$(dirname "$0")/.."

page="$(realpath "$1")"
least_charts="$2"
screenshot="$3"
most_bytes=3000000

browser="${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}"
if [ -z "$browser" ]; then
    echo "there is no Chromium; scripts/install-chromium.sh installs it, or name one in CHROMIUM" >&2
    exit 3
fi

bytes="$(stat -c %s "$page")"
if [ "$bytes" -gt "$most_bytes" ]; then
    echo "the page has $bytes bytes; $most_bytes is the most" >&2
    exit 1
fi

profile="$(mktemp -d)"
trap 'rm -rf "$profile"' EXIT
flags=(--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile"
    --virtual-time-budget=5000 --enable-logging=stderr --v=0)

timeout 120 "$browser" "${flags[@]}" --dump-dom "file://$page" > "$profile/dom.html" 2> "$profile/log"
if grep -E 'CONSOLE' "$profile/log"; then
    echo "the browser complained" >&2
    exit 1
fi
root="$(grep -o '<html[^>]*>' "$profile/dom.html" | head -n 1)"
charts="$(sed -n 's/.*data-charts="\([0-9]*\)".*/\1/p' <<< "$root")"
tables="$(sed -n 's/.*data-tables="\([0-9]*\)".*/\1/p' <<< "$root")"
if ! grep -q 'data-ready="yes"' <<< "$root"; then
    echo "the script of the page did not reach its end" >&2
    exit 1
fi
if [ "${charts:-0}" -lt "$least_charts" ] || [ "${tables:-0}" -lt 1 ]; then
    echo "the page has ${charts:-0} charts and ${tables:-0} tables; at least $least_charts and 1 are expected" >&2
    exit 1
fi

timeout 120 "$browser" "${flags[@]}" --window-size=1280,2400 --screenshot="$(realpath -m "$screenshot")" "file://$page" 2> "$profile/log"
pixels="$(stat -c %s "$screenshot")"
# A page without ink compresses to a few thousand bytes.
if [ "$pixels" -lt 20000 ]; then
    echo "the screenshot has $pixels bytes: there is nothing on it" >&2
    exit 1
fi
# A window of Chromium is at least 500 pixels wide; a frame in it is as wide as it is told.
phone=375
python3 - "$page" "$phone" > "$profile/phone.html" <<'PYTHON'
import html, sys
page, width = open(sys.argv[1], encoding="utf-8").read(), sys.argv[2]
print(f"""<!doctype html><body><iframe width="{width}" height="800" style="border:0" srcdoc="{html.escape(page)}"></iframe><script>
addEventListener("load", () => {{
  const root = document.querySelector("iframe").contentDocument.documentElement;
  const wide = [root, ...root.querySelectorAll("body *")].filter(element =>
    !element.closest("svg *") && element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1);
  document.documentElement.dataset.wide = wide.map(element => element.tagName + "." + element.className).join(" ") || "nothing";
}});
</script></body>""")
PYTHON
timeout 120 "$browser" "${flags[@]}" --window-size=600,900 --dump-dom "file://$profile/phone.html" > "$profile/dom.html" 2> "$profile/log"
wide="$(sed -n 's/.*data-wide="\([^"]*\)".*/\1/p' "$profile/dom.html" | head -n 1)"
if [ "$wide" != nothing ]; then
    echo "at $phone pixels these are clipped: ${wide:-the page did not load}" >&2
    exit 1
fi
echo "$charts charts, $tables tables, $bytes bytes, no complaint of the browser"
