// ---- the tour -----------------------------------------------------------------------------------

// A step sets the fields, explains them, asks for a guess, plays, and tells. The functions `set`,
// `right`, `why` (a sentence for each wrong answer) and `told` take their numbers from the C's
// answers. They are called once, when the question is asked. So later changes of the fields change
// no answer. until: the picture is drawn up to this time before the guess. {word} and {text|word}
// in sentences have a tip, from WORDS.
const idleUnits = r => short(r.makespan - r.busy / r.p), busyUnits = r => short(r.busy / r.p);
const TOUR = [
    {title: "Where does a pipeline idle?", open: "#schedules", until: 6,
     set: () => `The layers of a model are cut into ${shown.p} {stages|stage}, one on each GPU: ` +
                `the rows below. The batch is cut into ${shown.m} {micro-batches|micro-batch}. ` +
                "Each goes forward through all stages (a box of 1 unit of time), then backward " +
                "(2 units), in the order called {1F1B}.",
     ask: "How long does a stage wait in a step, as a share of the time in which it computes?",
     answers: ["12.50%", "37.50%", "75.00%"], right: () => percent(shown.bubble),
     why: () => ({
         "12.50%": `That is one micro-batch of ${shown.m}; a stage waits for ${shown.p - 1}. `,
         "75.00%": `At first ${shown.p - 1} of ${shown.p} stages wait, but not all the time. `
     }),
     told: () => `It is ${percent(shown.bubble)}: each stage computes for ${busyUnits(shown)} ` +
                 `units and waits for ${idleUnits(shown)}, (p - 1)/m = ` +
                 `${shown.p - 1}/${shown.m}. The first micro-batch has to reach the last stage, ` +
                 "and its gradient has to come back. The picture calls these waits fill, stall " +
                 "and drain; then a stage waits for the {norm} of all gradients.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Does more work help?", open: "#schedules?m=32", until: 6,
     set: () => `The same ${shown.p} stages and 1F1B, now with ${shown.m} micro-batches instead ` +
                `of ${DEFAULTS.schedules.m}.`,
     ask: "How large is the {bubble} now: a stage's waiting time as a share of its compute time?",
     answers: ["9.38%", "18.75%", "37.50%"], right: () => percent(shown.bubble),
     why: () => ({
         "18.75%": "That would be twice as many micro-batches; here are four times as many. ",
         "37.50%": "The wait is the same in units of time, but its share is not. "
     }),
     told: () => `It is ${percent(shown.bubble)}: a stage still waits for ${idleUnits(shown)} ` +
                 `units, and ${shown.m / Number(DEFAULTS.schedules.m)} times as much work stands ` +
                 "beside them. But a larger global batch is another training run, so m cannot " +
                 "grow at will.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Why GPipe runs out of memory", open: "#schedules?kind=gpipe&m=16", until: 6,
     set: () => `{GPipe} runs all ${shown.m} forwards of a step, then all backwards. From its ` +
                "forward to its backward a stage has to keep a micro-batch's {activations}.",
     ask: "Of how many micro-batches does stage 0 keep the activations at most?",
     answers: ["4", "8", "16"], right: () => String(shown.flight[0]),
     why: () => ({
         "4": "That is the number of stages, but nothing is freed before the last forward. ",
         "8": "Nothing is freed half way: the first backward comes after the last forward. "
     }),
     told: () => `It keeps all ${shown.flight[0]}. Twice the micro-batches need twice the ` +
                 "memory, so GPipe pays for a small bubble with memory.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "1F1B, beside it", open: "#schedules?m=16&pin=kind%3Dgpipe%26m%3D16", until: 6,
     set: () => `GPipe with ${pinned.m} micro-batches is pinned above. {1F1B}, below it, starts ` +
                "a backward as soon as one is possible, then alternates. Both take as long.",
     ask: "Of how many micro-batches does stage 0 keep the activations with 1F1B?",
     answers: ["4", "8", "16"], right: () => String(shown.flight[0]),
     why: () => ({
         "8": "Half of them would still grow with m, and 1F1B's number does not. ",
         "16": "That is GPipe, which frees nothing before its last forward. "
     }),
     told: () => `It keeps ${shown.flight[0]}, whatever m is: stage i keeps p - i. The bubble is ` +
                 `GPipe's, ${percent(shown.bubble)}, as the pinned picture shows.`,
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Go round twice", open: "#schedules?kind=interleaved&v=2&pin=1", until: 6,
     set: () => `Each GPU now has ${shown.v} {chunks|chunk} of layers, one early and one late in ` +
                "the model, so a micro-batch goes round twice. This is {interleaved 1F1B}. Plain " +
                `1F1B is pinned above: its bubble is ${percent(pinned.bubble)}.`,
     ask: "How large is the bubble of the interleaved one?",
     answers: ["18.75%", "37.50%", "75.00%"], right: () => percent(shown.bubble),
     why: () => ({
         "37.50%": "The wait is for one chunk to come through: only a part of a stage. ",
         "75.00%": "More rounds make smaller pieces, not longer waits. "
     }),
     told: () => `It is ${percent(shown.bubble)}: to fill takes 1/${shown.v} of the time, as a ` +
                 `chunk is 1/${shown.v} of a stage. The price is ${shown.p * shown.v - 1} ` +
                 `messages each way for a micro-batch instead of ${shown.p - 1}, and more ` +
                 "activations on the first stage.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "link_send"]},
    {title: "Make 1F1B hang", open: "#schedules?one=1", until: 4,
     set: () => "1F1B again. A GPU runs the work of one {stream} in order. Here each stage sends " +
                "and receives on the stream on which it computes, and a send waits until the " +
                "neighbour receives.",
     ask: "What happens?",
     answers: ["the same", "it is slower", "it hangs"],
     right: () => shown.hangs ? "it hangs"
                              : shown.bubble > shown.formula + 1e-9 ? "it is slower" : "the same",
     why: () => ({
         "the same": "It would be if a send returned at once, but it waits for its receiver. ",
         "it is slower": "It would be if only one stage waited; here two wait for each other. "
     }),
     told: () => `It hangs: stages ${circle(shown).join(" and ")} wait for each other (the ` +
                 "circle of arrows), each in a send that the other has not come to receive. So " +
                 "every direction of every link has a stream of its own.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "link_receive"]},
    {title: "Fill the bubble", open: "#schedules?kind=zb-h1&pin=1", until: 6,
     set: () => "A backward has two halves: {B} makes the gradient for which the stage before " +
                "waits; {W} makes the gradients of the weights, for which nobody waits. The " +
                "schedule {zb-h1} runs W later. 1F1B is pinned above: its bubble is " +
                `${percent(pinned.bubble)}.`,
     ask: "How large is the bubble of zb-h1?",
     answers: ["12.50%", "25.00%", "37.50%"], right: () => percent(shown.bubble),
     why: () => ({
         "25.00%": "W fills more than a third of the wait: of F + B + W only F + B - W is left. ",
         "37.50%": "To split is not enough, but here W also moves into the waits. "
     }),
     told: () => `It is ${percent(shown.bubble)}: W runs where a stage would wait, and no more ` +
                 `activations are kept than the ${pinned.flight[0]} on 1F1B's first stage. ` +
                 "{zb-auto}, given more memory, leaves no gap between a stage's own steps.",
     page: "course/10-zero-bubble.md", lesson: "3-pipeline.md",
     source: ["dev/lessons/train_zero_bubble.cu", "run_batch"]},
    {title: "What a ring sends", open: "#collectives?n=8",
     set: () => `${ringShown.n} GPUs ({ranks|rank}) hold ${bytesText(ringShown.bytes)} of ` +
                "gradients each, and each needs the sum of all. In a {ring} a rank sends to the " +
                `next one only, ${bytesText(ringShown.bytes / ringShown.n)} in each round.`,
     ask: "How much does each rank send until all have the sum?",
     answers: ["64.0 MiB", "112.0 MiB", "512.0 MiB"], right: () => bytesText(ringShown.sent),
     why: () => ({
         "64.0 MiB": "Once round, each part's sum is on one rank only, and has to reach all. ",
         "512.0 MiB": "That is the whole buffer in each of 8 rounds; a ring sends an eighth. "
     }),
     told: () => `It sends ${bytesText(ringShown.sent)}, in ${ringShown.rounds} rounds: 2 (n - ` +
                 "1)/n of the buffer. That is less than twice the buffer for any number of " +
                 "ranks, so rings scale in bytes, though not in latency.",
     page: "course/collectives.md", lesson: "2-tensor.md",
     source: ["train_gpt_tp.cu", "tensor_sum"]},
    {title: "Tensor ranks on two nodes",
     open: "#layout?tensor=8&data=1&pipeline=1&node=4&micro=2&global=16",
     set: () => `${laid.t} {tensor ranks} share every layer, and sum its results by rings, ` +
                `several times a layer. They are on ${laid.ranks / laid.node} {nodes|node} of ` +
                `${laid.node} GPUs; the network between nodes is slower than the links within one.`,
     ask: "What share of the bytes that they send leaves a node?",
     answers: ["none", "a quarter", "half"],
     right: () => {
         const total = name => laid.all[1].reduce((sum, op) => sum + op[name], 0);
         const share = Math.round(100 * total("across") / total("sent"));
         return {0: "none", 25: "a quarter", 50: "half"}[share] || "another";
     },
     why: () => ({
         "none": "A ring over two nodes has to cross over, and to come back. ",
         "half": "Half of the ranks are on each node, but most have their neighbour beside them. "
     }),
     told: () => `It is a quarter: 2 of the ring's ${laid.t} hops cross. But a ring is as fast ` +
                 "as its slowest hop, so all of it runs at the network's speed: t stays within a " +
                 "node.",
     lesson: "2-tensor.md", source: ["train_gpt_tp.cu", "f_backward_begin"]},
    {title: "Will 175 billion fit?", open: "#layout?model=gpt3-175b&zero=0",
     set: () => `GPT-3, ${countText(laid.parameters)} parameters, on ${laid.ranks} A100s: ` +
                `${laid.t} tensor x ${laid.d} data x ${laid.p} pipeline ranks. Activations are ` +
                "kept for no layer but computed again ({recompute}); there is no {ZeRO-1}.",
     ask: "Does it fit into the memory of the GPUs?",
     answers: ["it fits", "it does not fit"],
     right: () => fullestOf(laid) <= laid.memory ? "it fits" : "it does not fit",
     why: () => ({
         "it does not fit": `t x p = ${laid.t * laid.p} GPUs share the parameters: one has ` +
         `${countText(laid.parameters / laid.t / laid.p)} of them. `,
         "it fits": "Its weights do, but AdamW's state is " +
                    `${bytesText(fullestPart("optimizer"))} more. `
     }),
     told: () => `It ${fullestOf(laid) <= laid.memory ? "fits" : "does not fit"}: the fullest ` +
                 `stage needs ${bytesText(fullestOf(laid))} of ${bytesText(laid.memory)}, of ` +
                 `which AdamW's state is ${bytesText(fullestPart("optimizer"))}. The table "What ` +
                 `if", further down, says what one change would do: press ZeRO-1 in it.`,
     goto: ["to the table", "whatif"], lesson: "4-3d.md",
     source: ["train_gpt_3d.cu", "own_buckets"]},
];
// The last card, whose text is in page.html.
const TOUR_END = {title: "And now?", open: "#schedules?kind=zb-auto&pin=1"};

const WORDS = {
    "stage": "the layers that one GPU of a pipeline holds",
    "micro-batch": "a part of the batch that goes through the model at once",
    "1F1B": "one forward, one backward: after a few forwards a stage alternates",
    "norm": "the length of all gradients together, by which they are clipped",
    "bubble": "a stage's idle time as the pipeline fills and drains, as a share of its work",
    "GPipe": "the simplest schedule (Huang et al. 2019)",
    "activations": "what a forward computes on the way and the backward needs again",
    "chunk": "a run of layers; several of them on a GPU make its stage",
    "interleaved 1F1B": "1F1B with several chunks on each stage (Narayanan et al. 2021)",
    "stream": "CUDA's queue of work: one thing after the other",
    "B": "the half of a backward that makes the gradient of its input",
    "W": "the half of a backward that makes the gradients of its weights",
    "zb-h1": "a zero-bubble schedule with the memory of 1F1B (Qi et al. 2023)",
    "zb-auto": "a schedule found by a search, with twice the memory of 1F1B if nothing is said",
    "rank": "a process with one GPU",
    "ring": "the ranks in a circle: parts of a buffer go round to be summed, then to be handed out",
    "tensor ranks": "ranks that have a part of each layer's matrices",
    "node": "a computer with several GPUs",
    "recompute": "to run a layer's forward again in its backward, and keep only its input",
    "ZeRO-1": "each data rank keeps a part of the optimizer's state instead of all",
};

let tourStep = null, tourLeft = false;  // left: the fields are no longer the step's
let asked = null, guessed = 0;          // the question's sentences; the answer's number, 0: none

const fullestPart = name => Math.max(...laid.stages.map(stage => stage[name]));

// In a clone links lead to plain text, in the site to pages: a new tab keeps what is here, and a
// line is named.
const inClone = $("home").getAttribute("href").endsWith(".md");

function link(text, href) {
    const a = document.createElement("a");
    a.href = href;
    a.textContent = text;
    if (inClone && !href.startsWith("#")) a.target = "_blank";
    return a;
}
function sourceLink(text, file, name) {
    return inClone ? text : link(text, `../${file}#L${LINES[file][name]}`);
}

// Returns the nodes of a sentence, whose {words} have tips.
function withTips(sentence) {
    return sentence.split(/[{}]/).map((part, i) => {
        if (i % 2 === 0) return part;
        const [text, word] = part.split("|"), button = document.createElement("button");
        button.type = "button";
        button.className = "word";
        button.textContent = text;
        button.dataset.tip = WORDS[word || text];
        button.setAttribute("aria-label", `${text}: ${button.dataset.tip}`);
        button.onclick = () => button.focus();
        return button;
    });
}

function setGuessing(on) {
    document.querySelector("main").classList.toggle("guessing", on);
    for (const p of PANELS) section(p).inert = on;
}

function closeTour() {
    tourStep = null;
    tourLeft = false;
    $("tourbox").hidden = true;
    $("what").hidden = false;
    document.querySelector("main").classList.remove("touring");
    setGuessing(false);
}

// Says that the fields are no longer the question's, and leads back.
function leaveTour() {
    if (tourStep === null) return;
    tourLeft = true;
    $("left").lastElementChild.href = tourAddress();
    $("left").hidden = false;
}

const tourAddress = () => `#tour?step=${tourStep + 1}` + (guessed ? `&guess=${guessed}` : "");

// Opens a step, with the answer of an address if it has one.
async function openTour(step, answer) {
    const mine = tourStep = Math.max(1, Math.min(TOUR.length + 1, step)) - 1;
    const moved = !$("tourbox").hidden;
    const now = TOUR[mine] || TOUR_END, [name, query] = now.open.slice(1).split("?");
    tourLeft = false;
    guessed = 0;
    asked = null;
    $("tourbox").hidden = false;
    $("left").hidden = true;
    $("what").hidden = mine > 0;  // a question has to stand on one screen with its pictures
    document.querySelector("main").classList.add("touring");
    $("chips").replaceChildren(...[...TOUR, TOUR_END].map((x, i) => {
        const last = i === TOUR.length, li = document.createElement("li");
        const a = link(last ? "end" : String(i + 1), "#tour?step=" + (i + 1));
        a.title = x.title;
        a.setAttribute("aria-label", (last ? "end: " : `question ${i + 1}: `) + x.title);
        if (i === mine) a.setAttribute("aria-current", "step");
        li.append(a);
        return li;
    }));
    $("tourtitle").textContent = (mine < TOUR.length ? `${mine + 1} of ${TOUR.length}: ` : "") +
                                 now.title;
    $("tourend").hidden = mine < TOUR.length;
    $("question").hidden = mine === TOUR.length;
    for (const id of ["set", "asked", "told", "guesses"]) $(id).replaceChildren();
    if (mine < TOUR.length) $("asked").append(...withTips(now.ask));
    $("guesses").replaceChildren(...(now.answers || []).map(text => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = text;
        button.onclick = () => guess(button, text);
        return button;
    }));
    $("guesses").inert = true;
    setGuessing(mine < TOUR.length);
    window.scrollTo(0, 0);
    if (moved) $("tourtitle").focus({preventScroll: true});
    const wanted = new URLSearchParams(query || "");
    if (now.until) wanted.set("time", String(now.until));
    if (mine === 0 && isFirst(shown)) $("set").replaceChildren(...withTips(now.set()));
    const ok = await show(name, wanted);
    if (!ok || tourStep !== mine || mine === TOUR.length) return ok;
    asked = {right: now.right(), told: now.told(), why: now.why()};
    $("set").replaceChildren(...withTips(now.set()));
    $("guesses").inert = false;
    const before = now.answers[answer - 1];
    if (before) guess($("guesses").children[answer - 1], before, true);
    return ok;
}

// Marks the guess, plays (or shows the end, if quiet), and tells.
function guess(button, answer, quiet) {
    const now = TOUR[tourStep], {right, told, why} = asked;
    guessed = now.answers.indexOf(answer) + 1;
    for (const other of $("guesses").children) {
        other.classList.toggle("right", other.textContent === right);
        other.setAttribute("aria-pressed", String(other === button));
    }
    setGuessing(false);
    if (tourLeft) leaveTour();  // the way back has the guess now
    const [text, ways, links] = ["p", "p", "p"].map(tag => document.createElement(tag));
    text.append(...withTips((answer === right ? "Right. " : `No. ${why[answer] || ""}`) + told));
    const after = TOUR[tourStep + 1], next = link(after ? `Next: ${after.title}` : "What now?",
                                                  "#tour?step=" + (tourStep + 2));
    next.className = "button";
    ways.append(next, " ", link("change the fields", now.open));
    if (now.goto) {
        const down = document.createElement("button"), [name, id] = now.goto;
        down.type = "button";
        down.textContent = name;
        down.onclick = () => $(id).scrollIntoView({block: "center"});
        ways.append(" ", down);
    }
    const [file, name] = now.source;
    links.className = "note";
    links.append("Read on: ", link("the lesson", "course/" + now.lesson), ", ",
                 ...(now.page ? [link("doc/" + now.page, now.page), ", "] : []),
                 sourceLink(`${name} in ${file}, line ${LINES[file][name]}`, file, name));
    $("told").replaceChildren(text, ways, links);
    keepAddress();
    if (tourLeft || panel === "layout") return;
    if (quiet || window.matchMedia("(prefers-reduced-motion: reduce)").matches) showAll();
    else if (!playing) play();
}

// Shows the end of the animation of a panel.
function showAll() {
    if (panel === "schedules") timeShown = null, drawSchedule();
    if (panel === "collectives") roundShown = ringShown.rounds, drawRing();
}
