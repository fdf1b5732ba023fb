// ---- the tour -------------------------------------------------------------------------------------------------------

// A step sets the fields, asks for a guess, plays, and reveals. `right` and `told` take their numbers from what the C
// says; a guess is the text of an answer.
const TOUR = [
    {title: "Where does a pipeline idle?", open: "#schedules",
     ask: "Four stages, eight micro-batches, 1F1B. How much does a stage idle, as a share of its compute time?",
     answers: ["12.50%", "37.50%", "75.00%"], right: () => percent(shown.bubble),
     told: () => `${percent(shown.bubble)}: (p - 1)/m = 3/8. The pipeline has to fill before the last stage can ` +
                 `work, and ` +
                 "to drain behind it.", lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Does more work help?", open: "#schedules?m=32",
     ask: "Now 32 micro-batches instead of 8. What is the bubble?",
     answers: ["9.38%", "18.75%", "37.50%"], right: () => percent(shown.bubble),
     told: () => `${percent(shown.bubble)}: the idle time is the same, and four times as much work stands beside ` +
                 `it. But ` +
                 "a larger global batch is another training run, so m cannot grow at will.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Why GPipe runs out of memory", open: "#schedules?kind=gpipe&m=16",
     ask: "GPipe, 16 micro-batches. Of how many does stage 0 keep the activations at most?",
     answers: ["4", "8", "16"], right: () => String(shown.flight[0]),
     told: () => `All ${shown.flight[0]}: it runs every forward before the first backward. Twice the ` +
                 `micro-batches need ` +
                 "twice the memory, so GPipe's bubble is paid for with memory.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "1F1B, beside it", open: "#schedules?m=16&pin=kind%3Dgpipe%26m%3D16",
     ask: "1F1B takes as long as GPipe, which is pinned. Of how many micro-batches does its stage 0 keep activations?",
     answers: ["4", "8", "16"], right: () => String(shown.flight[0]),
     told: () => `${shown.flight[0]}, whatever m is: stage i starts a backward as soon as one is possible and ` +
                 `keeps p - i. ` +
                 "The bubble is GPipe's, as the pinned picture shows.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "run_batch"]},
    {title: "Go round twice", open: "#schedules?kind=interleaved&v=2&pin=1",
     ask: "Each stage now has two chunks of layers. The plain 1F1B is pinned: its bubble is 37.50%. And this one's?",
     answers: ["18.75%", "37.50%", "75.00%"], right: () => percent(shown.bubble),
     told: () => `${percent(shown.bubble)}: filling takes half as long, as a chunk is half a stage. The price is ` +
                 "7 messages each way for a micro-batch instead of 3, and more activations on the first stage.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "link_send"]},
    {title: "Make 1F1B hang", open: "#schedules?one=1",
     ask: "1F1B again, but each stage puts its sends and receives on its compute stream. What happens?",
     answers: ["the same", "it is slower", "it hangs"],
     right: () => shown.hangs ? "it hangs" : shown.makespan > 22 ? "it is slower" : "the same",
     told: () => `It hangs: stages ${circle(shown).join(" and ")} wait for each other, each in a send that the ` +
                 `other has ` +
                 "not come to receive. So every direction of every link has a stream of its own.",
     lesson: "3-pipeline.md", source: ["train_gpt_pp.cu", "link_receive"]},
    {title: "Fill the bubble", open: "#schedules?kind=zb-h1&pin=1",
     ask: "A backward split in two: B makes the input's gradient, W the weights', which can wait. 1F1B has " +
                 "37.50%; zb-h1?",
     answers: ["12.50%", "25.00%", "37.50%"], right: () => percent(shown.bubble),
     told: () => `${percent(shown.bubble)}: W runs where a stage would wait, and no more activations are kept ` +
                 `than on ` +
                 "1F1B's first stage. zb-auto, given more memory, leaves no gap between a stage's own steps.",
     page: "course/10-zero-bubble.md", lesson: "3-pipeline.md",
     source: ["dev/lessons/train_zero_bubble.cu", "run_batch"]},
    {title: "What a ring sends", open: "#collectives?n=8",
     ask: "Eight ranks sum 64 MiB by a ring. How much does each rank send?",
     answers: ["64.0 MiB", "112.0 MiB", "512.0 MiB"], right: () => bytesText(ringShown.sent),
     told: () => `${bytesText(ringShown.sent)}: 2 (n - 1)/n of the buffer. That is less than twice the buffer for ` +
                 `any number of ` +
                 "ranks, so rings scale in bytes, though not in latency.",
     page: "course/collectives.md", lesson: "2-tensor.md", source: ["train_gpt_tp.cu", "tensor_sum"]},
    {title: "Tensor ranks on two nodes", open: "#layout?tensor=8&data=1&pipeline=1&node=4&micro=2&global=16",
     ask: "Eight tensor ranks on two nodes of four GPUs. What share of their bytes leaves a node?",
     answers: ["none", "a quarter", "half"],
     right: () => { const x = laid.all[1].reduce((sum, op) => [sum[0] + op.across, sum[1] + op.sent], [0, 0]);
                    return {0: "none", 25: "a quarter", 50: "half"}[Math.round(100 * x[0] / x[1])] || "another"; },
     told: () => "A quarter: two of the ring's eight hops cross. But the ring is as fast as its slowest hop, so " +
                 "all of it " +
                 "runs at the network's speed: t stays within a node.",
     lesson: "2-tensor.md", source: ["train_gpt_tp.cu", "f_backward_begin"]},
    {title: "Will 175 billion fit?", open: "#layout?model=gpt3-175b&zero=0",
     ask: "GPT-3 on 1536 A100s: 8 tensor x 16 data x 12 pipeline, every layer recomputed, no ZeRO. Does it fit?",
     answers: ["it fits", "it does not fit"],
     right: () => fullestOf(laid) <= laid.memory ? "it fits" : "it does not fit",
     told: () => "The fullest stage needs " +
                 `${bytesText(fullestOf(laid))} of ${bytesText(laid.memory)}. Below, each line says what one change ` +
                 "would do: press ZeRO-1.",
     lesson: "4-3d.md", source: ["train_gpt_3d.cu", "own_buckets"]},
];

let tourStep = null, tourLeft = false;  // left: the fields are no longer the step's

const sourceLink = (file, name) => `../${file}#L${LINES[file][name]}`;

function closeTour() {
    tourStep = null;
    tourLeft = false;
    $("tour").hidden = true;
    document.querySelector("main").classList.remove("guessing");
}

async function openTour(step) {
    tourStep = Math.max(1, Math.min(TOUR.length, step)) - 1;
    tourLeft = false;
    const now = TOUR[tourStep], [name, query] = now.open.slice(1).split("?");
    $("tour").hidden = false;
    $("chips").replaceChildren(...TOUR.map((x, i) => {
        const li = document.createElement("li"), a = document.createElement("a");
        a.href = "#tour?step=" + (i + 1);
        a.textContent = `${i + 1}. ${x.title}`;
        if (i === tourStep) a.setAttribute("aria-current", "step");
        li.append(a);
        return li;
    }));
    $("asked").textContent = now.ask;
    $("told").replaceChildren();
    $("guesses").replaceChildren(...now.answers.map(answer => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = answer;
        button.onclick = () => guess(button, answer);
        return button;
    }));
    $("guesses").inert = true;
    document.querySelector("main").classList.add("guessing");
    const ok = await show(name, new URLSearchParams(query || ""));
    if (ok && panel === "schedules") timeShown = 0, drawSchedule();
    $("guesses").inert = false;
    return ok;
}

// Marks the guess, plays, and tells.
function guess(button, answer) {
    const now = TOUR[tourStep], right = now.right();
    for (const other of $("guesses").children) {
        other.classList.toggle("right", other.textContent === right);
        other.setAttribute("aria-pressed", String(other === button));
    }
    document.querySelector("main").classList.remove("guessing");
    const link = (text, href) => {
        const a = document.createElement("a");
        a.href = href;
        a.textContent = text;
        return a;
    };
    const [file, name] = now.source, told = document.createElement("p"), links = document.createElement("p");
    told.textContent = (answer === right ? "Right. " : `No: ${right}. `) + now.told();
    links.append("Read on: ", link("the lesson", "course/" + now.lesson), ", ",
                 ...(now.page ? [link("doc/" + now.page, now.page), ", "] : []),
                 link(`${name} in ${file}, line ${LINES[file][name]}`, sourceLink(file, name)), ". ");
    const next = TOUR[tourStep + 1];
    if (next) links.append(link(`Next: ${next.title}`, "#tour?step=" + (tourStep + 2)));
    $("told").replaceChildren(told, links);
    if (panel !== "layout" && !playing) play();
}

