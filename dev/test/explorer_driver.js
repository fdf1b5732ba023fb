// explorer_driver.js: dev/test/run_explorer.sh appends it to a copy of doc/explorer.html. It opens one address after
// the other and writes what the page says of each, in lines: the number of the address, then what the trainers print
// too. While it works the page's load event waits for a document that stays open, and so does the browser.
(async () => {
    const out = [], frame = document.createElement("iframe");
    document.body.append(frame);
    frame.contentDocument.open();
    const say = (...words) => out.push(words.join(" "));
    const numbers = () => JSON.parse($("numbers").textContent);
    for (const [i, hash] of ADDRESSES.entries()) {
        history.replaceState(null, "", hash);
        const ok = await open(hash), x = numbers();
        if (panel === "layout") say(i, "flags" + flagsOf(ok ? state.layout : Object.fromEntries(
            fields("layout").map(f => [f.name, valueOf(f)]))));
        if (!ok) {
            say(i, "refused", x.refused);
        } else if (panel === "schedules") {
            x.flight.forEach((most, s) => say(i, "stage", s, most, short(x.span[s])));
            if (x.hangs) say(i, "hangs", x.circle.join("->"), x.stuck.join(" | "));
            else say(i, "bubble", x.bubble, short(x.makespan - x.busy / x.p), short(x.busy / x.p));
        } else if (panel === "layout") {
            for (let rank = 0; rank < laid.ranks; rank++) {
                const s = laid.rank(rank).bytes;
                say(i, "rank", rank, s.weights, s.gradients, s.optimizer, s.activations);
            }
            x.all.forEach((group, g) => group.forEach((op, o) => {
                if (op.calls) say(i, "traffic", GROUPS[g], OPS[o], op.calls, op.sent, op.received);
            }));
            let each = 0;  // the sums of what the single ranks send
            const total = sent => sent.flat().reduce((sum, one) => sum + one.sent, 0);
            for (let rank = 0; rank < laid.ranks; rank++) each += total(laid.rank(rank).sent);
            say(i, "sums", each === total(x.all) ? "agree" : "differ");
        } else {
            say(i, "ring", x.rounds, x.sent, x.counted, x.last.map(row => row.join(",")).join(";"));
        }
        if (ok) {  // the address that the page now shows leads to the same numbers
            const before = $("numbers").textContent, shownAt = location.hash;
            await open(shownAt);
            say(i, "address", $("numbers").textContent === before && location.hash === shownAt ? "same" : "differs");
        }
    }
    // Bad input leaves everything but the sentence as it was.
    history.replaceState(null, "", "#schedules");
    await open("#schedules");
    const picture = $("timeline").toDataURL(), text = $("facts").textContent;
    const field = section("schedules").querySelector("[name=p]");
    for (const bad of ["x", "0", "", "-1", "1e9", "<b>"]) {
        field.value = bad;
        await changed(field);
        say("bad", !$("refusal").hidden && location.hash === "#schedules" && $("facts").textContent === text &&
            $("timeline").toDataURL() === picture && state.schedules.p === "4" ? "kept" : "changed", bad);
    }
    // Keys.
    await open("#schedules");
    const press = (id, key) => $(id).dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    press("timeline", "ArrowLeft");
    const earlier = timeShown;
    press("timeline", "End");
    say("keys", earlier !== null && timeShown === null ? "time" : "nothing");
    await open("#layout");
    press("grid", "ArrowRight");
    press("grid", "ArrowDown");
    say("keys", rankShown === 33 ? "rank" : "nothing", rankShown);
    await open("#collectives");
    press("ring", "ArrowRight");
    say("keys", roundShown === 1 && location.hash === "#collectives?round=1" ? "round" : "nothing", roundShown);
    await open("#schedules");
    field.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowUp", bubbles: true}));
    for (let i = 0; i < 100 && state.schedules.p !== "5"; i++) await new Promise(done => setTimeout(done, 10));
    say("keys", state.schedules.p === "5" && location.hash === "#schedules?p=5" ? "number" : "nothing", field.value);
    // How long drawing takes, from the input to the picture: the shortest of some times, as others use the machine too.
    for (const hash of SLOW) {
        let least = Infinity;
        for (let i = 0; i < 20 && least > 200; i++) {
            const begin = performance.now();
            const ok = await open(hash);
            if (ok) least = Math.min(least, performance.now() - begin);
        }
        say("time", least.toFixed(0), hash);
    }
    const result = document.createElement("pre");
    result.id = "result";
    result.textContent = "\n" + out.join("\n") + "\nend\n";
    document.body.replaceChildren(result, frame);
    frame.contentDocument.close();
})();
