#!/usr/bin/env bash
# run_axe.sh: axe finds no violation in any panel of doc/explorer.html: light and dark, 1280 and 390
# pixels wide. Axe comes with the PyPI package axe-core-python (or axe-selenium-python); without it
# or Chromium this test is skipped.
. "$(dirname "$0")/report.sh"
axe=$(python3 - 2>/dev/null <<'EOF'
import glob, importlib.util
for name in ("axe_core_python", "axe_selenium_python"):
    spec = importlib.util.find_spec(name)
    if spec is None:
        continue
    folder = spec.submodule_search_locations[0]
    for path in glob.glob(folder + "/**/axe.min.js", recursive=True):
        print(path)
EOF
)
axe=${axe%%$'\n'*}
[ -n "$axe" ] || skip 'no axe: python3 -m pip install axe-core-python'
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
[ -n "$chromium" ] || skip 'no Chromium'

# The pages: an address, and the clicks on it.
{
    cat doc/explorer.html
    echo '<script>'
    cat "$axe"
    cat <<'EOF'

(async () => {
    const pause = ms => new Promise(go => setTimeout(go, ms));
    const until = async done => { for (let i = 0; i < 1500 && !done(); i++) await pause(20); };
    const laidOut = () => until(() => $("curves").dataset.done);
    const STATES = [
        ["#schedules"],
        ["#schedules?kind=zb-h1&pin=1&follow=3&transfer=0.3"],
        ["#schedules?one=1&time=7"],
        ["#schedules?kind=zb-auto&p=0"],
        ["#schedules?kind=list", () => {
            $("timeline").focus();
            const down = new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true});
            $("timeline").dispatchEvent(down);
            document.querySelector("footer details").open = true;
        }],
        ["#layout?stage=1", laidOut],
        ["#layout?model=ptdp-1t&memory=30", laidOut],
        ["#layout?precision=fp8"],
        ["#layout?model=mixtral-8x7b&rank=5"],
        ["#layout?model=llama-3.1-8b", async () => {
            await laidOut();
            await search();
            $("samebox").open = true;
        }],
        ["#collectives"],
        ["#collectives?op=zigzag+attention&round=1"],
        ["#tour"],
        ["#tour?step=6", async () => {
            $("guesses").children[0].click();
            await pause(300);
            stop();
        }],
        ["#tour?step=11"],
        ["#tour?step=7&guess=2"],
        ["#tour?step=10", async () => { $("guesses").children[1].click(); await laidOut(); }],
    ];
    const name = `${darkTheme.matches ? "dark" : "light"}, ${innerWidth} pixels: `;
    for (const [hash, act] of STATES) {
        let found;
        try {
            await open(hash);
            await (act && act());
            found = (await axe.run(document)).violations.map(x => {
                const summary = x.nodes[0].failureSummary.replace(/\s+/g, " ");
                return x.id + " " + x.nodes[0].target + " " + summary;
            });
            if (document.documentElement.scrollWidth > innerWidth) {
                found.push("wider than the window");
            }
        } catch (e) {
            found = ["failed: " + e.message];
        }
        parent.postMessage(name + hash + "|" + found.join(" || "), "*");
    }
    for (const tag of ["img", "input"]) {
        document.querySelector("main").append(document.createElement(tag));
    }
    const planted = (await axe.run(document)).violations.map(x => x.id);
    const both = planted.includes("image-alt") && planted.includes("label");
    parent.postMessage(name + "an image and a field without names are found|" +
        (both ? "" : "they are not: " + planted), "*");
    parent.postMessage("end", "*");
})();
</script>
EOF
} >"$dir/page.html"
cat >"$dir/frames.html" <<'EOF'
<!DOCTYPE html><iframe id="hold"></iframe>
<iframe src="page.html" style="width:1280px;height:900px"></iframe>
<iframe src="page.html" style="width:390px;height:844px"></iframe>
<script>
const hold = document.getElementById("hold"), lines = [];
hold.contentDocument.open();  // the page's load event waits for it
let ended = 0;
onmessage = ({data}) => {
    if (data !== "end") return void lines.push(data);
    if (++ended < 2) return;
    const result = document.createElement("pre");
    result.id = "result";
    result.textContent = "\n" + lines.join("\n") + "\nend\n";
    document.body.append(result);
    hold.contentDocument.close();
};
</script>
EOF
for theme in 1 0; do
    timeout 200 "$chromium" --headless --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
        --window-size=1800,1000 --blink-settings=preferredColorScheme=$theme \
        --dump-dom "file://$dir/frames.html" 2>"$dir/browser" |
        sed -n '/<pre id="result">/,/^end$/p' |
        sed '1d; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >"$dir/said"
    [ "$(tail -n 1 "$dir/said")" = end ]
    report $? 'axe comes to its end'
    while IFS='|' read -r state found; do
        [ "$state" = end ] && break
        [ -z "$found" ]
        report $? "$state $found"
    done <"$dir/said"
done
finish
