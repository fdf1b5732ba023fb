#!/usr/bin/env bash
# doc.sh: makes the pictures and tables of README.md and doc/ again, from runs on this machine.
# `make doc` builds first. It writes into the working tree: look at the result, then commit it.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
pictures=doc/pictures
. dev/launch.sh

build/tools/figures $pictures
build/tools/study dev/scale/rows_a100.csv $pictures

mkdir -p build/out
make --no-print-directory DEVICE=cpu run-train | tee build/out/console.txt
cp build/out/timeline.svg $pictures/main.svg
cp build/out/profile.svg $pictures/profile.svg

dev/plot/schedules.sh build/cpu-fp32 $pictures
dev/plot/traced.sh build/cpu-bf16 $pictures

for browser in chromium chromium-browser google-chrome; do
    command -v $browser >/dev/null || continue
    profile=$(mktemp -d)
    {   # the page's load event, and so the picture, waits for the last curve
        cat doc/explorer.html
        cat <<'END'
<script>
const hold = document.createElement("iframe");
document.body.append(hold);
hold.hidden = true;
hold.contentDocument.open();
setInterval(() => { if ($("curves").dataset.done) hold.remove(); }, 50);
</script>
END
    } >"$profile/page.html"
    $browser --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1180 \
        --user-data-dir="$profile" --screenshot=$pictures/explorer.png \
            "file://$profile/page.html#layout" 2>/dev/null
    rm -rf "$profile"
    break
done
make --no-print-directory DEVICE=cpu PRECISION=fp32 experts
cp build/out/experts.svg $pictures/experts.svg

dev/test/run_experiments.sh build/cpu-fp32
dev/plot/other_layers.sh build/cpu-fp32 $pictures
rm -f build/test-logs/test_gpt_fp32.log  # tables.sh then runs the layouts
dev/diffs.py write
dev/plot/tables.sh write build/cpu-fp32 all
