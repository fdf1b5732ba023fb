// layout.cu: a trainer's answer to a command line, for the page. The answer has its refusals, the
// bytes of every stage and of a step. It compiles the trainer itself with the stubs of device.h
// and files.h. One rank of every stage makes the plan of a --dry-run, then runs one step, whose
// calls are counted.
//
// Four trainers are compiled in:
//   train_gpt_3d       GPT-2
//   train_zero_bubble  schedules with a split backward
//   train_llama        Llama and its kin
//   train_5d           context parallelism and experts, in bf16
// Compiled once for each precision; PRECISION is its name.
#include "files.h"

#include "llmc/zero_bubble.h"

// Of schedule.c, which is compiled once.
extern "C" double lists_bubble(const PipelineLists *lists, const double *cost, size_t L);
extern "C" double schedule_formula(int kind, int p, int m, int v, double forward, double backward,
                                   double weight);

// All stages of a layout take their steps from the same lists: the first call makes and proves
// them.
static struct {
    PipelineLists lists;
    bool made;
} shared;

static bool shared_split_lists(PipelineLists *l, Schedule schedule, const char *file, size_t p,
                               size_t m, size_t v, const PipelineTimes *times, size_t limit,
                               Error *err) {
    if (!shared.made)
        shared.made =
            zero_bubble_lists(&shared.lists, schedule, file, p, m, v, times, limit, err);
    *l = shared.lists;
    return shared.made;
}

static bool shared_lists(PipelineLists *l, Schedule schedule, const char *file, size_t p,
                         size_t m, size_t v, Error *err) {
    if (!shared.made) shared.made = pipeline_lists(&shared.lists, schedule, file, p, m, v, err);
    *l = shared.lists;
    return shared.made;
}

// The buffers that a trainer's layout takes, by the names of its source, each with the bytes of
// all that have its name. The arenas of weights and gradients have one buffer each, which the
// table of tensors cuts.
#include "llmc/trainer/arena.cuh"
enum { TAKEN_MOST = 80 };
typedef struct {
    const Arena *arena;
    const char *name;
    size_t bytes;
} Taken;
static Taken taken[TAKEN_MOST];
static int taken_count;

static void taken_add(const Arena *arena, const char *name, size_t bytes) {
    int i = 0;
    while (i < taken_count && (taken[i].arena != arena || strcmp(taken[i].name, name) != 0)) i++;
    if (!bytes || i == TAKEN_MOST) return;
    if (i == taken_count) taken[taken_count++] = {arena, name, 0};
    taken[i].bytes += bytes;
}

template <class T> static void take_named(Arena *arena, T *&p, size_t count, const char *name) {
    size_t before = arena->used;
    take(arena, p, count);
    taken_add(arena, name, arena->used - before);
}
#define take(arena, p, count) take_named(arena, p, count, #p)

#define pipeline_lists shared_lists
#define zero_bubble_lists shared_split_lists
#define pipeline_lists_free(lists) (void)(lists)
#define main static unused_main
#include "train_gpt_3d.cu"
namespace zero_bubble {
#include "dev/lessons/train_zero_bubble.cu"
}
#ifdef PRECISION_BF16
#include "five.h"
#else
#include "llama.h"
namespace five = llama;  // of which the page asks nothing
#endif
#undef main
static inline void trainer_leave(Trainer *) {}

enum { TRAINER_3D, TRAINER_ZERO_BUBBLE, TRAINER_LLAMA, TRAINER_5D };  // as the page numbers them

enum { LAYOUT_WORDS = 128, LAYOUT_PASSES = 1 << 22 };

// The result for the page. Sizes are doubles, which hold bytes up to 2^53.
typedef struct {
    double layers, slots, weights, gradients, optimizer, activations;
} StageBytes;
typedef struct {
    double calls, sent, received, across;  // across: bytes sent that leave a node
} Sent;
typedef struct {
    double stages, micros, chunks, parameters, flops, reserve, counted, bubble, formula;
    // What all ranks together send, and what one does.
    Sent all[GROUP_COUNT][NCCL_MPI_OPS], rank[GROUP_COUNT][NCCL_MPI_OPS];
    StageBytes rank_bytes;
    StageBytes stage[1];  // [stages] of the first rank of each
} Layout;

// The calls of one rank of a stage; its other ranks make the same.
typedef struct {
    Traffic *calls;
    int count;
} StageCalls;

static struct {
    Grid grid;
    int chunks, node;  // GPUs of a node
    int trainer;       // TRAINER_...
    StageCalls *stages;
    Layout *result;
    size_t c, e;       // neighbours of the data ranks that share a sequence, or the experts
    const Job *job;    // of the rank that layout_rank looks at
} plan;

// Returns the data rank `further` places behind this one's in a group of some data ranks.
static size_t data_rank_behind(const Grid *g, int group, size_t further) {
    size_t size = group == GROUP_CONTEXT || group == GROUP_CONTEXT_SUMS ? plan.c : plan.e;
    size_t among = g->d_rank % size, first = g->d_rank - among;
    if (group == GROUP_EXPERT_DATA) return (g->d_rank + further * size) % g->d;
    return first + (among + further) % size;
}

// Returns the rank that receives from this one in a call: its neighbour on a ring, or the link's
// other end.
static int receiver(const Grid *g, const Traffic *call) {
    if (call->group == GROUP_WORLD) return (int)((g->rank + 1) % g->world);
    if (call->group == GROUP_TENSOR)
        return grid_rank_at(g, (g->t_rank + 1) % g->t, g->d_rank, g->p_rank);
    if (call->group == GROUP_DATA)
        return grid_rank_at(g, g->t_rank, (g->d_rank + 1) % g->d, g->p_rank);
    if (call->group == GROUP_EMBEDDING)
        return grid_rank_at(g, g->t_rank, g->d_rank, g->p_rank ? 0 : g->p - 1);
    if (call->group != GROUP_PIPELINE) {
        bool message = call->op == NCCL_MPI_SEND || call->op == NCCL_MPI_RECV;
        size_t further = message ? (size_t)call->to : 1;
        size_t d_rank = data_rank_behind(g, call->group, further);
        return grid_rank_at(g, g->t_rank, d_rank, g->p_rank);
    }
    Grid to = *g;
    grid_place(&to, (size_t)call->to);
    return grid_rank_at(g, g->t_rank, g->d_rank, to.p_rank);
}

// Adds the bytes that one rank sends in a step.
static void add_rank(Sent sums[GROUP_COUNT][NCCL_MPI_OPS], size_t rank) {
    Grid g = plan.grid;
    grid_place(&g, rank);
    const StageCalls *calls = &plan.stages[g.p_rank];
    const size_t c = plan.c, e = plan.e;
    const size_t sizes[GROUP_COUNT] = {g.world, g.t, g.d, 2, 2, c, c, e, g.d / e};
    const size_t keys[GROUP_COUNT] = {
        rank,         g.t_rank,     g.d_rank,     0,           g.p_rank != 0,
        g.d_rank % c, g.d_rank % c, g.d_rank % e, g.d_rank / e};
    for (int i = 0; i < calls->count; i++) {
        const Traffic *call = &calls->calls[i];
        NcclMpiCounter one = {0, 0, 0};
        bool message = call->op == NCCL_MPI_SEND || call->op == NCCL_MPI_RECV;
        size_t n = sizes[call->group], key = keys[call->group], root = message ? n : 0;
        if (message && call->to == 0 && call->group != GROUP_PIPELINE) root = key;  // to itself
        ring_traffic(&one, (NcclMpiOp)call->op, call->count, call->width, n, key, root);
        Sent *sum = &sums[call->group][call->op];
        bool crosses = (int)rank / plan.node != receiver(&g, call) / plan.node;
        sum->calls += call->calls;
        sum->sent += (double)one.bytes_sent * call->calls;
        sum->received += (double)one.bytes_received * call->calls;
        sum->across += crosses ? (double)one.bytes_sent * call->calls : 0.0;
    }
}

// Only train_5d has experts and cut sequences.
//   experts_of  Returns the experts of a layer and the ranks that share them out.
//   set_keys    Takes a buffer in the place of start_keys, which reads a batch.
//   tell_own    Names a rank's experts and tokens.
typedef struct {
    size_t E, e;
} Experts;
static Experts experts_of(const Trainer *) { return {1, 1}; }
static void set_keys(Trainer *) {}
static void tell_own(const Trainer *) {}
#ifdef PRECISION_BF16
static Experts experts_of(const five::GPT *m) { return {m->moe.E ? m->moe.E : 1, m->experts.e}; }
static void set_keys(five::GPT *m) { host_array(m->scores, m->micros * plan.c); }

static void tell_own(const five::GPT *m) {
    size_t first = SIZE_MAX, last = 0, T = m->T;
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        if (!(x->spec->flags & TENSOR_EXPERTS)) continue;
        size_t expert = tensor_expert(&m->config, x, m->moe.E);
        if (expert < first) first = expert;
        if (expert > last) last = expert;
    }
    if (m->moe.E && first == last)
        fprintf(stderr, ", expert %zu of %zu in each layer", first, m->moe.E);
    else if (m->moe.E)
        fprintf(stderr, ", experts %zu-%zu of %zu in each layer", first, last, m->moe.E);
    if (plan.c == 1) return;
    const size_t at[] = {0, T / 2 - 1, T / 2, T - 1};
    size_t tokens[4];
    for (int i = 0; i < 4; i++) tokens[i] = tokens_position(m->tokens, at[i]);
    fprintf(stderr, ". It computes tokens %zu-%zu and %zu-%zu of its sequences", tokens[0],
            tokens[1], tokens[2], tokens[3]);
}
#endif

// Says in stderr_text which part of the model a rank holds.
static void tell_held(const Trainer *m, const PipelinePlan *held) {
    stderr_text[0] = 0;
    for (size_t c = 0; c < held->chunks; c++) {
        size_t first = held->layers[held->first[c]];
        fprintf(stderr, "%s %zu-%zu", c ? "," : "layers", first, first + held->count[c] - 1);
    }
    fprintf(stderr, ", %zu of %zu heads", m->NHl, m->config.NH);
    if (m->table.shard.embedding || m->table.shard.head)
        fprintf(stderr, ", rows %zu-%zu of the vocabulary", m->V0, m->V0 + m->Vl - 1);
}

// Makes the communicators of the rank whose plan m holds.
template <class Model> static void connect_rank(Model *m) {
    char *nowhere = (char *)1;  // no buffer has the address NULL
    m->weights.base = m->gradients.base = m->optimizer.base = m->activations.base = nowhere;
    layout(m);
    job_connect(&m->job);
    set_keys(m);
    connect(m);
    plan.job = &m->job;
}

// Runs one step of that rank. Returns its calls.
template <class Model> static StageCalls count_step(Model *m) {
    connect_rank(m);
    host_array(m->host_sums, m->micros), host_array(m->host_norms, m->share.piece_count);
    host_array(m->host_totals, count_tensors(&m->config) + TOTALS_EXTRA);
    job_reset_traffic(&m->job);
    m->opt.simulate = "this page";  // so that the step reads no data
    train_step(m);
    StageCalls calls = {traffic, traffic_count};
    return calls;
}

// The command line of layout_run.
static struct {
    char *words[LAYOUT_WORDS];
    int count;
} command;

// Cuts a command line at its spaces; the first word is the program.
static void cut_words(char *line) {
    static char program[] = "trainer";
    command.words[0] = program;
    command.count = 1;
    for (char *at = line; *at && command.count < LAYOUT_WORDS;) {
        command.words[command.count++] = at;
        at += strcspn(at, " ");
        while (*at == ' ') *at++ = 0;
    }
}

// Parses the command line as the trainer's main does.
enum { ALL_SECTIONS = OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA };
template <class Model> static void open_trainer(Model *m) {
    trainer_open(m, command.count, command.words, ALL_SECTIONS);
}
static void open_trainer(llama::GPT *m) {
    llama_make(&m->llama);
    FieldTable rows = llama::options_of(m);
    Lesson lesson = {rows, llama::check_llama, &m->llama.spec, llama_sizes, tokenizer_open_kind};
    trainer_open(m, command.count, command.words, ALL_SECTIONS, lesson);
}

#ifdef PRECISION_BF16
static void open_trainer(five::GPT *m) {
    moe_llama_make(&m->model);
    FieldTable rows = five::options_of(m);
    Lesson lesson = {rows, five::check_5d, &m->llama.spec, sizes_5d, tokenizer_open_kind};
    trainer_open(m, command.count, command.words, ALL_SECTIONS, lesson);
}
#endif

// A rank's plan of memory. Does not return if the trainer refuses: it prints why, and exits.
template <class Model> static void plan_rank(Model *m, int rank, int t, int d, int p) {
    new (m) Model();  // all zeros, but for train_5d's reference to a part of itself
    ranks_are(rank, t, d, p);
    open_trainer(m);
    shard(m);
    taken_count = 0;
    layout(m);
}

template <class Model> static StageBytes bytes_of(const Model *m) {
    return {(double)m->plan.layer_count, (double)m->plan.slots,     (double)m->weights.used,
            (double)m->gradients.used,   (double)m->optimizer.used, (double)m->activations.used};
}

template <class Model> static Model model;

template <class Model> static const Layout *run_layout(char *line, int t, int d, int p, int node) {
    Model *m = &model<Model>;
    cut_words(line);
    memset(&shared, 0, sizeof shared);
    stderr_text[0] = 0;
    plan_rank(m, 0, t, d, p);  // whatever the trainer would refuse has been refused now
    plan.grid = m->grid;
    plan.chunks = (int)m->opt.chunks;
    plan.node = node;
    plan.c = m->opt.context;
    plan.e = experts_of(m).e;
    plan.stages = (StageCalls *)host_alloc((size_t)p, sizeof *plan.stages);
    Traffic *calls = (Traffic *)host_alloc((size_t)p * TRAFFIC_MOST, sizeof *calls);
    Layout *r = plan.result =
        (Layout *)host_alloc(1, sizeof(Layout) + (size_t)p * sizeof(StageBytes));
    r->stages = p;
    r->micros = (double)m->micros;
    r->chunks = plan.chunks;
    r->parameters = (double)count_parameters(&m->config);
    size_t T = m->opt.seq;
    r->flops = count_flops(&m->config, (double)m->opt.global_batch * (double)T, T);
    r->reserve = (double)GPU_RESERVE;
    double passes = (double)(m->config.L * m->micros * experts_of(m).E);
    r->counted = node && passes <= LAYOUT_PASSES;
    PipelineTimes costs = zero_bubble_times(m->config.C, m->T);
    r->formula = schedule_formula(m->opt.schedule, p, (int)m->micros, plan.chunks, costs.step[0],
                                  costs.step[1], costs.step[2]);
    size_t mark = heap_mark();
    r->bubble = lists_bubble(&shared.lists, costs.step, m->config.L);
    for (int stage = 0; stage < p; stage++) {
        heap_reset(mark);
        plan_rank(m, grid_rank_at(&plan.grid, 0, 0, (size_t)stage), t, d, p);
        r->stage[stage] = bytes_of(m);
        if (!r->counted) continue;
        StageCalls made = count_step(m);
        plan.stages[stage].calls = calls + (size_t)stage * TRAFFIC_MOST;
        plan.stages[stage].count = made.count;
        memcpy(plan.stages[stage].calls, made.calls, (size_t)made.count * sizeof *made.calls);
    }
    heap_reset(mark);
    for (size_t rank = 0; rank < plan.grid.world; rank++) add_rank(r->all, rank);
    return r;
}

// Runs the command line for t x d x p ranks, `node` of them on a node (0: traffic is not
// counted), by a trainer. The result lives as long as the program.
extern "C" const Layout *layout_run(char *line, int t, int d, int p, int node, int trainer) {
    plan.trainer = trainer;
    if (trainer == TRAINER_5D) return run_layout<five::GPT>(line, t, d, p, node);
    if (trainer == TRAINER_LLAMA) return run_layout<llama::GPT>(line, t, d, p, node);
    if (trainer == TRAINER_ZERO_BUBBLE) return run_layout<zero_bubble::GPT>(line, t, d, p, node);
    return run_layout<GPT>(line, t, d, p, node);
}

template <class Model> static void show_rank(int rank) {
    Model *m = &model<Model>;
    plan_rank(m, rank, (int)plan.grid.t, (int)plan.grid.d, (int)plan.grid.p);
    plan.result->rank_bytes = bytes_of(m);
    tell_held(m, &m->plan);
    tell_own(m);
    if (plan.trainer == TRAINER_5D) connect_rank(m);
}

// Returns the traffic and the bytes of one rank of the layout above. stderr_text says what it
// holds. Data ranks differ a little: the norm keeps a list of the pieces of tensors that they
// own.
extern "C" const Layout *layout_rank(int rank) {
    memset(plan.result->rank, 0, sizeof plan.result->rank);
    add_rank(plan.result->rank, (size_t)rank);
    size_t mark = heap_mark();
    if (plan.trainer == TRAINER_5D) show_rank<five::GPT>(rank);
    else if (plan.trainer == TRAINER_LLAMA) show_rank<llama::GPT>(rank);
    else if (plan.trainer == TRAINER_ZERO_BUBBLE) show_rank<zero_bubble::GPT>(rank);
    else show_rank<GPT>(rank);
    heap_reset(mark);  // layout_group comes before memory is taken again
    return plan.result;
}

// Returns communicator number i of that rank of train_5d, or NULL.
extern "C" const ncclComm *layout_group(int i) {
    return i < (int)plan.job->group_count ? plan.job->groups[i] : NULL;
}

// Writes the buffers of a stage's first rank into stderr_text, a line for each: arena, bytes,
// name. Of weights and gradients it lists the tensors, those of all layers together.
template <class Model> static void stage_buffers(int stage) {
    Model *m = &model<Model>;
    plan_rank(m, grid_rank_at(&plan.grid, 0, 0, (size_t)stage), (int)plan.grid.t,
              (int)plan.grid.d, (int)plan.grid.p);
    for (size_t i = 0; i < m->table.count; i++) {
        const Tensor *x = &m->table.tensors[i];
        taken_add(&m->weights, x->spec->name, x->size * sizeof(floatX));
        taken_add(&m->gradients, x->spec->name, x->size * sizeof(float));
    }
    stderr_text[0] = 0;
    for (int i = 0; i < taken_count; i++) {
        const Taken *x = &taken[i];
        bool whole = strcmp(x->name, "state->params") == 0 || strcmp(x->name, "state->grads") == 0;
        if (whole) continue;
        fprintf(stderr, "%s %.0f %s\n",
                x->arena == &m->weights     ? "weights"
                : x->arena == &m->gradients ? "gradients"
                : x->arena == &m->optimizer ? "optimizer"
                                            : "activations",
                (double)x->bytes, x->name);
    }
}

extern "C" void layout_buffers(int stage) {
    size_t mark = heap_mark();
    if (plan.trainer == TRAINER_5D) stage_buffers<five::GPT>(stage);
    else if (plan.trainer == TRAINER_LLAMA) stage_buffers<llama::GPT>(stage);
    else if (plan.trainer == TRAINER_ZERO_BUBBLE) stage_buffers<zero_bubble::GPT>(stage);
    else stage_buffers<GPT>(stage);
    heap_reset(mark);
}

// Returns a rank's place: t_rank + t * (d_rank + d * p_rank).
extern "C" int layout_place(int rank) {
    Grid g = plan.grid;
    grid_place(&g, (size_t)rank);
    return (int)(g.t_rank + g.t * (g.d_rank + g.d * g.p_rank));
}
