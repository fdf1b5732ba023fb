// memory.h: the memory of a layout on each device, from the trainers. train_gpt_3d.cu,
// train_zero_bubble.cu, train_v.cu, train_fsdp.cu, train_llama.cu and train_5d.cu are compiled into
// the planner (plan.cu). Their own `layout` counts allocations, and their own checks refuse
// layouts. PLAN_WITHOUT_V leaves out train_v, and a Wish must have no_v. PLAN_WITHOUT_EXPERTS
// leaves out train_5d.
//
// defines: Candidate, StageMemory, candidate_refused, candidate_left_out, candidate_memory
#ifndef DEV_PLAN_MEMORY_H
#define DEV_PLAN_MEMORY_H

#include "dev/plan/models.h"
#include "dev/scale/step.h"

// A layout that training could take. Recomputation and schedule as the trainers' flags name them.
typedef struct {
    StepLayout run;
    int recompute;          // RECOMPUTE_...
    int llama;              // of NAMES_5D; 0: a GPT-2
    double bound, seconds;  // of a step: no less than; simulated, or 0
    double clock;           // s of the step on the trainer's own clock, 0 if it was not asked
    size_t memory;          // bytes of the fullest stage, with the cluster's reserve
    size_t fullest;         // that stage
} Candidate;

static inline void candidate_recompute(Candidate *x, int recompute) {
    static const LayerRecompute of[] = {LAYER_KEEPS, LAYER_GELU, LAYER_WHOLE};
    x->recompute = recompute, x->run.recompute = of[recompute];
}

typedef struct {
    size_t weights, gradients, optimizer, activations;
} StageMemory;

static inline size_t stage_memory_sum(const StageMemory *s) {
    return s->weights + s->gradients + s->optimizer + s->activations;
}

// Returns the trainer's options for a layout.
static inline Options candidate_options(const Candidate *x, size_t vocabulary) {
    const StepLayout *r = &x->run;
    Options o;
    memset(&o, 0, sizeof o);
    bool data = r->shard || r->muon;
    o.groups = rank_options(data ? OPTIONS_DATA : OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA);
    o.config = {r->layers, r->C, r->NH, vocabulary, padded_vocabulary(vocabulary), r->T, NULL};
    o.seq = r->T;
    o.micro_batch = r->micro_batch, o.global_batch = r->global_batch;
    o.grid.t = r->t, o.grid.p = r->p, o.grid.d = r->d, o.chunks = r->v;
    o.context = step_context(r);
    o.schedule = r->schedule, o.max_in_flight = r->max_in_flight;
    o.layers_per_stage = r->stages[0] ? r->stages : NULL;
    o.sequence_parallel = r->sequence_parallel, o.zero = r->zero, o.recompute = x->recompute;
    o.order = r->order[0] ? r->order : "tdp";
    o.dry_run = true;
    return o;
}

// Makes the model of a size in LLAMA_SIZES, for t tensor ranks. False if train_llama refuses it.
static inline bool candidate_llama(Llama *m, int size, const GPTConfig *config, size_t t,
                                   Error *err) {
    LlamaOptions flags = {size, 0, 0, 0, 0};
    return llama_resolve(m, &flags, config, false, t, err);
}

#ifndef PLAN_WITHOUT_EXPERTS
// The current mixture of experts. Its hundreds of rows are made once, and again only for another
// mixture.
typedef struct {
    MoeLlama model;
    int place;     // of NAMES_5D, 0: none yet
    size_t makes;  // how often rows were made
} Mixture;

static inline Mixture *candidate_mixture() {
    static Mixture mixture;
    return &mixture;
}

// Fills in train_5d's flags for a layout, and the model in candidate_mixture. False if train_5d
// refuses it.
static inline bool candidate_5d(const Candidate *x, Options *o, Options5D *flags, Error *err) {
    Mixture *mixture = candidate_mixture();
    memset(flags, 0, sizeof *flags);
    flags->llama.model = x->llama;
    flags->context.c = step_context(&x->run);
    flags->context.ring = 1;  // the trainer's default, and all that the light simulation knows
    flags->e = x->run.e;
    flags->capacity = x->run.capacity;
    bool made = mixture->place == x->llama;
    if (!made) mixture->place = 0, mixture->makes++;
    if (!moe_llama_resolve(&mixture->model, flags, o, made, err)) return false;
    mixture->place = x->llama;
    return true;
}

// True if train_5d accepts a mixture's layout. Leaves out the checks that all trainers have.
static inline bool candidate_mixes(const Candidate *x, Options *o, Error *err) {
    Options5D flags;
    return candidate_5d(x, o, &flags, err);
}

// Returns the spec of the mixture that candidate_mixes accepted last.
static inline const ModelSpec *candidate_mixture_spec() {
    return &candidate_mixture()->model.llama.spec;
}

// True if e divides the experts and the data ranks, and the optimizer is sharded.
static inline bool candidate_experts_divide(const StepLayout *r, bool zero, Error *err) {
    MoeSpec experts = moe_spec(r->E, r->k);
    experts.e = r->e;
    return moe_check(&experts, r->d, zero, err);
}
#else
static inline bool candidate_mixes(const Candidate *, Options *, Error *) { return false; }
static inline const ModelSpec *candidate_mixture_spec() { return NULL; }
static inline bool candidate_experts_divide(const StepLayout *, bool, Error *) { return true; }
#endif

// True if the trainer refuses this layout, with its error message in *err.
static inline bool candidate_refused(const Candidate *x, size_t vocabulary, Error *err) {
    const StepLayout *r = &x->run;
    Options o = candidate_options(x, vocabulary);
    if (x->llama && (r->shard || step_split(r)))
        return !error_set(err,
                          "%s has the schedules gpipe, 1f1b and interleaved, and no FSDP",
                          r->E ? "train_5d" : "train_llama");
    Llama llama;
    if (x->llama && !r->E) {
        if (!candidate_llama(&llama, x->llama, &o.config, r->t, err)) return true;
        o.config.spec = &llama.spec;
    }
    return !options_resolve(&o, NULL, r->ranks, err) ||
           (r->E && !candidate_mixes(x, &o, err)) ||
           !step_schedule_check(r, (Schedule)o.schedule, step_micros(r), err);
}

// True if the trainer accepts this layout but the planner does not try it: a V with too few stages
// or micro-batches. *err has the reason.
static inline bool candidate_left_out(const Candidate *x, Error *err) {
    const StepLayout *r = &x->run;
    size_t m = step_micros(r);
    if (!step_folded(r) || (r->p > 1 && m >= 2 * r->p)) return false;
    return !error_set(err,
                      "--schedule %s is tried with 2 or more stages and twice as many "
                      "micro-batches, not with %zu and %zu: it would idle longer than others",
                      pipeline_schedule_name(r->schedule), r->p, m);
}

// Returns how many (micro-batch, chunk) pairs a stage holds activations of;
// dev/test/test_pipeline.c holds the lists to the same numbers.
static inline size_t candidate_slots(const StepLayout *r, size_t stage) {
    size_t p = r->p, m = step_micros(r), most = m * r->v;
    if (r->schedule == SCHEDULE_1F1B) most = p - stage;
    if (r->schedule == SCHEDULE_INTERLEAVED) most = 2 * (p - stage - 1) + (r->v - 1) * p + 1;
    if (r->schedule == SCHEDULE_ZB_H1) most = p;
    if (r->schedule == SCHEDULE_ZB_AUTO) most = r->max_in_flight ? r->max_in_flight : 2 * p;
    if (step_folded(r)) most = (size_t)v_limit(r->schedule, (int)p);
    return most < m * r->v ? most : m * r->v;
}

static inline void release(Acts *x) { free(x->layers), free(x->residual); }
static inline void release(zero_bubble::Acts *x) {
    free(x->layers), free(x->residual), free(x->grads);
}
static inline void release(llama::Acts *x) { free(x->layers), free(x->residual); }
#ifndef PLAN_WITHOUT_EXPERTS
static inline void release(five::Acts *x) { free(x->layers), free(x->residual); }
#endif

// Releases what one trainer's layout alone takes.
static inline void release_own(Trainer *) {}

#ifndef PLAN_WITHOUT_V
static inline void release(v_schedules::Acts *x) {
    free(x->layers), free(x->residual), free(x->grads);
}
static inline void release_own(v_schedules::GPT *m) { free(m->held); }
#endif

// Sets what a trainer's `shard` adds to the sizes that all trainers have.
static inline void candidate_sizes(Trainer *, const Candidate *) {}
static inline void candidate_sizes(llama::GPT *m, const Candidate *x) {
    Error err;
    if (!candidate_llama(&m->llama, x->llama, &m->config, x->run.t, &err))
        abort();  // candidate_refused asked
    m->config.spec = &m->llama.spec;
    trainer_sizes(m, x->run.t);
    llama::set_sizes(m, x->run.t);
}

// Takes this rank's part of the model.
static inline void candidate_shard(Trainer *m, const Candidate *, Shard mine) {
    trainer_shard(m, mine);
}
static inline void candidate_release_table(Trainer *m) { table_free(&m->table); }

#ifndef PLAN_WITHOUT_EXPERTS
static inline void candidate_sizes(five::GPT *m, const Candidate *x) {
    Error err;
    if (!candidate_5d(x, &m->opt, &m->flags, &err)) abort();  // candidate_refused asked
    m->model = candidate_mixture()->model;
    m->config.spec = &candidate_mixture()->model.llama.spec;
    m->context.cut = m->flags.context;
    m->moe = {m->model.E, m->model.k, step_places(&x->run), 0, 0, m->model.normalised};
    m->experts.e = x->run.e;
    trainer_sizes(m, x->run.t);
    five::set_sizes(m, x->run.t);
}

// A mixture's table has thousands of tensors, and many layouts have the same: it is kept.
enum { KEPT_TABLES = 512, KEPT_KEY = 7 };
typedef struct {
    size_t key[KEPT_KEY];  // begins with a number of Mixture.makes; 0: none yet
    ParamTable table;
} KeptTable;

static inline void candidate_shard(five::GPT *m, const Candidate *x, Shard mine) {
    static KeptTable kept[KEPT_TABLES];
    const StepLayout *r = &x->run;
    const size_t makes = candidate_mixture()->makes;
    const size_t key[KEPT_KEY] = {makes, r->t, r->p, r->v, r->d, r->e, m->grid.p_rank};
    size_t hash = 0;
    for (int i = 0; i < KEPT_KEY; i++) hash = (hash ^ key[i]) * 0x9e3779b97f4a7c15u;
    KeptTable *k = &kept[(hash >> 32) % KEPT_TABLES];
    if (memcmp(k->key, key, sizeof key) != 0 || r->stages[0]) {
        table_free(&k->table);
        mine.e = mine.t;
        k->table = table_make(&m->config, mine);
        table_keep_experts(&k->table, m->moe.E, m->experts.e, 0);
        memcpy(k->key, key, sizeof key);
        if (r->stages[0]) k->key[0] = 0;  // its layers are not in the key
    }
    m->table = k->table;
    state_create(&m->share, &m->table);
    state_create(&m->state, &m->table);
}
static inline void candidate_release_table(five::GPT *) {}
#endif

// Returns the arenas of a stage, counted by a trainer's own layout function.
template <class Model>
static inline StageMemory candidate_count(const Candidate *x, size_t vocabulary, size_t stage,
                                          void (*layout)(Model *),
                                          void (*own_buckets)(Model *, State *)) {
    const StepLayout *r = &x->run;
    Model model = {}, *m = &model;
    m->opt = candidate_options(x, vocabulary);
    m->config = m->opt.config, m->grid = m->opt.grid;
    Error err;
    if (!grid_make(&m->grid, r->ranks, 0, m->opt.order, &err)) abort();  // candidate_refused asked
    grid_place(&m->grid, grid_rank_at(&m->grid, 0, 0, stage));
    m->B = r->micro_batch, m->T = step_tokens(r), m->micros = step_micros(r);
    trainer_sizes(m, r->t);
    candidate_sizes(m, x);
    m->sp = r->sequence_parallel ? r->t : 1;
    bool folded = step_folded(r);
    pipeline_plan_layers(&m->plan, r->layers, m->opt.layers_per_stage, r->p, stage, r->v, folded);
    m->plan.slots = candidate_slots(r, stage);
    size_t align = TENSOR_ALIGN * r->d;
    bool head = stage == (folded ? 0 : r->p - 1);
    candidate_shard(m, x, {r->t, 0, stage == 0, head, m->plan.layer_count, m->plan.layers, align, 1,
                           0});
    own_buckets(m, &m->share);
    if (m->opt.zero) own_buckets(m, &m->state);
    layout(m);
    StageMemory used = {m->weights.used, m->gradients.used, m->optimizer.used, m->activations.used};
    for (size_t i = 0; i < m->plan.slots; i++) release(&m->slots[i]);
    release_own(m);
    free(m->slots), free(m->w), free(m->dw);
    free(m->share.host_pieces), free(m->state.host_pieces);
    free(m->plan.first), free(m->plan.count), free(m->plan.layers);
    candidate_release_table(m);
    return used;
}

// Returns the arenas of a rank under FSDP, which all ranks have alike.
static inline StageMemory candidate_sharded(const Candidate *x, size_t vocabulary) {
    const StepLayout *r = &x->run;
    fsdp::GPT model, *m = &model;
    memset(m, 0, sizeof *m);
    m->opt = candidate_options(x, vocabulary);
    m->flags.shard = r->shard == 2 ? fsdp::SHARD_2 : fsdp::SHARD_3;
    m->flags.replicas = r->replicas ? r->replicas : 1;
    m->config = m->opt.config, m->grid = m->opt.grid;
    Error err;
    if (!grid_make(&m->grid, r->ranks, 0, m->opt.order, &err)) abort();  // candidate_refused asked
    m->B = r->micro_batch, m->T = r->T, m->micros = r->global_batch / (r->micro_batch * r->d),
    m->sp = 1;
    trainer_sizes(m, 1);
    fsdp::shard(m);
    fsdp::layout(m);
    StageMemory used = {m->weights.used, m->gradients.used, m->optimizer.used, m->activations.used};
    free(m->acts.layers), free(m->acts.residual), free(m->whole), free(m->dwhole), free(m->holds);
    free(m->w), free(m->dw);
    free(m->share.host_pieces), free(m->state.host_pieces);
    table_free(&m->table);
    return used;
}

// Returns the arenas of the fullest data rank under Muon (dev/plan/muon.h).
static StageMemory candidate_muon(const Candidate *x, size_t vocabulary);

// Returns a stage's arenas, by the trainer that runs the layout.
static inline StageMemory candidate_stage(const Candidate *x, size_t vocabulary, size_t stage) {
    if (x->run.shard) return candidate_sharded(x, vocabulary);
    if (x->run.muon) return candidate_muon(x, vocabulary);
#ifndef PLAN_WITHOUT_EXPERTS
    if (x->run.E)
        return candidate_count<five::GPT>(x, vocabulary, stage, five::layout, five::own_buckets);
#endif
    if (x->llama)
        return candidate_count<llama::GPT>(x, vocabulary, stage, llama::layout,
                                           llama::own_buckets);
#ifndef PLAN_WITHOUT_V
    if (step_folded(&x->run))
        return candidate_count<v_schedules::GPT>(x, vocabulary, stage, v_schedules::layout,
                                                 v_schedules::own_buckets);
#endif
    if (step_split(&x->run))
        return candidate_count<zero_bubble::GPT>(x, vocabulary, stage, zero_bubble::layout,
                                                 zero_bubble::own_buckets);
    return candidate_count<GPT>(x, vocabulary, stage, layout, own_buckets);
}

// True if a stage cannot be fuller than the one before it: it has as many layers, no more
// micro-batches, and neither end of the model.
static inline bool candidate_stage_no_fuller(const StepLayout *r, size_t stage) {
    return stage > 1 && stage + 1 < r->p && step_layers(r, stage) == step_layers(r, stage - 1) &&
           candidate_slots(r, stage) <= candidate_slots(r, stage - 1);
}

// Sets the bytes of the fullest stage. `all`: looks at every stage. Otherwise looks at the first,
// which keeps most micro-batches, the second, and the last, which has the logits.
static inline void candidate_memory(Candidate *x, size_t vocabulary, size_t reserve, bool all) {
    size_t p = x->run.p;
    x->memory = 0;
    for (size_t s = 0; s < p; s++) {
        if (!all && s > 1 && s != p - 1) continue;
        if (candidate_stage_no_fuller(&x->run, s)) continue;
        StageMemory stage = candidate_stage(x, vocabulary, s);
        size_t sum = stage_memory_sum(&stage) + reserve;
        if (sum > x->memory) x->memory = sum, x->fullest = s;
    }
}

#endif
