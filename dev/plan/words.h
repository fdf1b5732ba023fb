// words.h: the planner's question and answers as words. A command line becomes a wish, a layout
// becomes flags, and a layout that is refused, too large or slower becomes a sentence.
//
// defines: RECOMPUTE_NAMES, read_wish, wish_candidate, mfu, simulated, layout_flags, model_flags,
//          counts_text, neighbour_text, DimensionCost, dimension_costs, nothing_text
#ifndef DEV_PLAN_WORDS_H
#define DEV_PLAN_WORDS_H

#include "dev/plan/models.h"
#include "dev/plan/search.h"

static const char *const RECOMPUTE_NAMES[] = {"none", "gelu", "layer"};
typedef struct {
    const char *name;
    size_t *number, most;
} SizeFlag;
typedef struct {
    const char *name;
    int *choice;
    const char *const *names;
    int count;
} ChoiceFlag;

static inline bool read_size(const char *flag, const char *text, size_t most, size_t *number,
                             Error *err) {
    char *end;
    unsigned long long x = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (x == 0 || *end || x > most)
        return error_set(err, "%s must be a whole number from 1 to %zu", flag, most);
    *number = (size_t)x;
    return true;
}

// Fills the wish and the cluster's path. False, with an error message, if an option is wrong.
static inline bool read_wish(Wish *w, const char **cluster, bool *json, bool *light, int argc,
                             char **argv, Error *err) {
    static const char *const schedules[] = {"gpipe",   "1f1b", "interleaved", "zb-h1",
                                            "zb-auto", "zb-v", "v-half",      "dualpipe-v"};
    static const char *const switches[] = {"0", "1"}, *const shards[] = {"0", "2", "3"},
                             *const optimizers[] = {"adamw", "muon"};
    const char *model = NULL, *value;
    const SizeFlag sizes[] = {{"--layers", &w->model.L, 100000},
                              {"--heads", &w->model.NH, 100000},
                              {"--channels", &w->model.C, 1000000},
                              {"--seq", &w->T, 1000000},
                              {"--vocab", &w->model.V, 10000000},
                              {"--gpus", &w->ranks, 65536},
                              {"--batch", &w->global_batch, 1000000},
                              {"--tensor", &w->t, 65536},
                              {"--pipeline", &w->p, 65536},
                              {"--data", &w->d, 65536},
                              {"--virtual", &w->v, 65536},
                              {"--context", &w->c, 65536},
                              {"--expert-parallel", &w->e, 128},
                              {"--replicas", &w->replicas, 65536},
                              {"--micro-batch", &w->micro_batch, SEARCH_MICRO_BATCH}};
    const ChoiceFlag choices[] = {{"--schedule", &w->schedule, schedules, SCHEDULE_COUNT},
                                  {"--recompute", &w->recompute, RECOMPUTE_NAMES, 3},
                                  {"--sequence-parallel", &w->sequence_parallel, switches, 2},
                                  {"--zero", &w->zero, switches, 2},
                                  {"--shard", &w->shard, shards, 3},
                                  {"--optimizer", &w->muon, optimizers, 2}};
    memset(w, 0, sizeof *w);
    w->capacity = -1;
    w->schedule = w->recompute = w->sequence_parallel = w->zero = w->shard = -1;
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        bool *on = strcmp(flag, "--json") == 0    ? json
                   : strcmp(flag, "--light") == 0 ? light
                   : strcmp(flag, "--no-v") == 0  ? &w->no_v
                                                  : NULL;
        if (on) {
            *on = true;
            continue;
        }
        if (i + 1 == argc) return error_set(err, "%s is no flag, or its value is missing", flag);
        value = argv[++i];
        bool known = false;
        for (size_t f = 0; f < sizeof sizes / sizeof *sizes && !known; f++) {
            if (strcmp(sizes[f].name, flag) != 0) continue;
            if (!read_size(flag, value, sizes[f].most, sizes[f].number, err)) return false;
            known = true;
        }
        for (size_t f = 0; f < sizeof choices / sizeof *choices && !known; f++) {
            if (strcmp(choices[f].name, flag) != 0) continue;
            for (int c = 0; c < choices[f].count; c++)
                if (strcmp(value, choices[f].names[c]) == 0) *choices[f].choice = c, known = true;
            if (!known)
                return error_set(err, "%s cannot be '%s': did you mean %s?", flag, value,
                                 tool_nearest(value, choices[f].names, (size_t)choices[f].count));
        }
        if (known) continue;
        if (strcmp(flag, "--model") == 0) model = value;
        else if (strcmp(flag, "--cluster") == 0) *cluster = value;
        else if (strcmp(flag, "--order") == 0) w->order = value;
        else if (strcmp(flag, "--capacity") == 0) {
            char *end;
            w->capacity = strtod(value, &end);
            if (end == value || *end || !(w->capacity >= 0 && w->capacity <= 128))
                return error_set(err, "--capacity must be a number from 0 to 128");
        }
        else if (strcmp(flag, "--layers-per-stage") == 0) w->stages = value;
        else return error_set(err, "there is no flag %s", flag);
    }
    if (w->shard > 0) w->shard++;  // the position of "2" and "3"
    if (w->replicas && w->shard < 2)
        return error_set(err, "--replicas is for FSDP: add --shard 2 or --shard 3");
    if (w->replicas && w->ranks % w->replicas)
        return error_set(err, "--replicas %zu does not divide %zu GPUs", w->replicas, w->ranks);
    if (model) {
        Model found;
        char nearest[32];
        if (!model_find(model, &found, &w->llama)) {
            model_nearest(model, nearest);
            return error_set(err, "there is no model '%s': did you mean %s?", model, nearest);
        }
        if (!w->model.L) w->model.L = found.layers;
        if (!w->model.NH) w->model.NH = found.heads;
        if (!w->model.C) w->model.C = found.channels;
        if (!w->model.V) w->model.V = found.vocabulary;
        if (!w->T) w->T = found.seq;
    }
    if ((w->c || w->e || w->capacity >= 0) && !llama_experts(w->llama))
        return error_set(err, "--context, --expert-parallel and --capacity are for a mixture of "
                              "experts, such as --model mixtral-8x7b");
    if (w->muon && !wish_allows_muon(w))
        return error_set(err, "--optimizer muon is for a GPT-2 on data ranks with ZeRO: leave out "
                              "--tensor, --pipeline, --virtual, --schedule, --sequence-parallel, "
                              "--shard and --zero 0");
    if (!w->model.L || !w->model.NH || !w->model.C || !w->model.V || !w->T)
        return error_set(err,
                         "name a --model, or --layers, --heads, --channels, --seq and --vocab");
    if (!*cluster || !w->ranks || !w->global_batch)
        return error_set(err, "--cluster, --gpus and --batch are needed");
    if (w->order) {
        Grid grid = {0, 0, 1, 1, 1, 0, 0, 0, ""};
        if (!grid_make(&grid, 1, 0, w->order, err)) return false;
    }
    if (w->stages && (strlen(w->stages) >= sizeof(((StepLayout *)0)->stages) || !w->p ||
                      !stage_list_is(w->stages, w->model.L, w->p, 1)))
        return error_set(err,
                         "--layers-per-stage needs --pipeline and a number for each stage, which "
                         "sum to the %zu "
                         "layers",
                         w->model.L);
    w->model.Vp = padded_vocabulary(w->model.V);
    w->model.maxT = w->T;
    return true;
}

// Returns the one layout of a wish that leaves nothing open; zb-auto keeps max_in_flight
// micro-batches.
static inline Candidate wish_candidate(const Search *s, size_t max_in_flight) {
    const Wish *w = &s->wish;
    Candidate x = search_blank(s, w->ranks);
    x.run.t = w->t, x.run.p = w->p, x.run.d = w->d, x.run.v = w->v,
    x.run.micro_batch = w->micro_batch;
    if (w->c) x.run.c = w->c;
    if (w->e) x.run.e = w->e;
    x.run.schedule = (Schedule)w->schedule,
    x.run.max_in_flight = w->schedule == SCHEDULE_ZB_AUTO ? max_in_flight : 0;
    x.run.sequence_parallel = w->sequence_parallel > 0, x.run.zero = w->zero > 0;
    candidate_recompute(&x, w->recompute);
    return x;
}

static inline double mfu(const Search *s, const Candidate *x) {
    GPTConfig config = s->wish.model;
    Llama llama;
    Error err;
    Options o = candidate_options(x, s->wish.model.V);
    if (x->run.E) {
        if (candidate_mixes(x, &o, &err)) config.spec = candidate_mixture_spec();
    } else if (x->llama && candidate_llama(&llama, x->llama, &config, x->run.t, &err))
        config.spec = &llama.spec;
    double flops =
        count_flops(&config, (double)s->wish.global_batch * (double)s->wish.T, s->wish.T);
    return flops / (x->seconds * (double)s->wish.ranks * s->cluster->peak_bf16);
}

static inline StepTime simulated(const Search *s, const Candidate *x) {
    StepTime time;
    Error err;
    memset(&time, 0, sizeof time);
    step_simulate(s->cluster, &x->run, &time, &err);
    return time;
}

// Writes the flags of the layout for its trainer into text.
static inline void layout_flags(char *text, size_t size, const Candidate *x) {
    const StepLayout *r = &x->run;
    int n = r->shard
                ? snprintf(text, size, "--shard %zu --data %zu --micro-batch %zu", r->shard, r->d,
                           r->micro_batch)
            : r->muon
                ? snprintf(text, size, "--data %zu --micro-batch %zu", r->d, r->micro_batch)
                : snprintf(text, size, "--tensor %zu --data %zu --pipeline %zu --micro-batch %zu",
                           r->t, r->d, r->p, r->micro_batch);
#define FLAG(...) n += snprintf(text + n, size - (size_t)n, __VA_ARGS__)
    if (r->shard && r->replicas > 1) FLAG(" --replicas %zu", r->replicas);
    if (r->v > 1 && !step_folded(r)) FLAG(" --virtual %zu", r->v);
    else if (r->p > 1) FLAG(" --schedule %s", pipeline_schedule_name(r->schedule));
    if (r->stages[0]) FLAG(" --layers-per-stage %s", r->stages);
    if (r->schedule == SCHEDULE_ZB_AUTO) FLAG(" --max-in-flight %zu", r->max_in_flight);
    if (r->sequence_parallel) FLAG(" --sequence-parallel 1");
    if (x->recompute) FLAG(" --recompute %s", RECOMPUTE_NAMES[x->recompute]);
    if (r->d > 1 && !r->shard && !r->muon) FLAG(" --zero %d", r->zero);
    if (r->E) FLAG(" --context %zu --expert-parallel %zu --capacity %g", r->c, r->e, r->capacity);
    if (strcmp(r->order, "tdp") != 0) FLAG(" --order %s", r->order);
#undef FLAG
}

// Writes the flags of the model and the batch. Leaves out the sizes that a name gives.
static inline void model_flags(char *text, size_t size, const Wish *w) {
    const LlamaSize *s = llama_size(w->llama);
    const struct { const char *flag; size_t value, named; } sizes[] = {
        {"layers", w->model.L, s->L}, {"heads", w->model.NH, s->NH}, {"channels", w->model.C, s->C},
        {"vocab", w->model.V, s->V}, {"seq", w->T, 0}, {"global-batch", w->global_batch, 0}};
    char name[32];
    llama_name(w->llama, name);
    int n = w->llama ? snprintf(text, size, "--model %s ", name) : 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value != sizes[i].named)
            n += snprintf(text + n, size - (size_t)n, "--%s %zu ", sizes[i].flag, sizes[i].value);
    text[n - 1] = 0;
}

// Writes the numbers of layouts that were refused, are too large, were simulated, or cannot win.
static inline void counts_text(const Search *s, char *text, size_t size) {
    size_t all = s->listed + s->refused;
    int n = snprintf(text, size, "%zu layouts: ", all);
    if (s->refused)
        n += snprintf(text + n, size - (size_t)n, "%zu the trainer refuses (such as: %s), ",
                      s->refused, s->why);
    if (s->too_large)
        n += snprintf(text + n, size - (size_t)n, "%zu do not fit into %.1f GiB, ", s->too_large,
                      s->cluster->memory / 1073741824.0);
    n += snprintf(text + n, size - (size_t)n, "%zu simulated", s->simulated);
    if (s->beaten)
        snprintf(text + n, size - (size_t)n, ", %zu cannot be among the best", s->beaten);
}

// The traffic of a rank of the first stage in a dimension.
//   t, c, e  In the forward of a layer and micro-batch.
//   p        To the next stage.
//   d        Once a step.
typedef struct {
    char name;
    size_t size;
    double bytes, seconds;
} DimensionCost;
enum { DIMENSIONS = 5 };

static inline void dimension_costs(const Search *s, const Candidate *x,
                                   DimensionCost costs[DIMENSIONS]) {
    const Cluster *c = s->cluster;
    const StepLayout *r = &x->run;
    Grid g = step_grid(c, r);
    LayerShape shape = step_shape(c, r, &g, 0);
    double sum, gather, update, e = LAYER_WIDTH, t = (double)r->t, cut = (double)step_context(r);
    double rows = (double)(shape.B * shape.T) * (double)r->C;
    double keys = (double)(shape.B * shape.T) * ((double)layer_qkv(&shape) -
                                                 (double)layer_heads(&shape));
    double experts = (double)r->e, d = (double)r->d;
    double routed = e * (double)shape.places * (double)r->C;
    double parts = shape.gather > 0 ? t : 1;  // of t tensor ranks each exchanges a part
    step_data(c, r, &g, 0, &sum, &gather, &update);
    CollectiveKind kind = r->sequence_parallel ? COLLECTIVE_ALL_GATHER : COLLECTIVE_ALL_REDUCE;
    double calls = r->sequence_parallel ? 4 : 2;
    double dense = step_parameters(r, 0) * (d - 1) / d;
    double held = step_experts(r, 0) * (1 - experts / d);
    const DimensionCost all[DIMENSIONS] = {
        {'t', r->t, 4 * e * rows * (t - 1) / t,
         r->t > 1 ? calls * layer_collective(c, &shape, kind) : 0},
        {'c', r->c, e * keys * (cut - 1), (cut - 1) * shape.ring[RING_KEYS]},
        {'e', r->e, 2 * routed * ((experts - 1) / experts / parts + (parts - 1) / parts),
         2 * (shape.exchange + shape.gather)},
        {'p', r->p, r->p > 1 ? e * rows / t : 0, r->p > 1 ? step_send(c, r, &g, 0) : 0},
        {'d', r->d, (c->gradient_bytes + e) * (dense + held), sum + gather},
    };
    memcpy(costs, all, sizeof all);
}

// Says how a neighbour of the best layout does: refused, too large, or slower, by how much and
// why.
static inline void neighbour_text(const Search *s, Candidate x, char *text, size_t size) {
    Error err;
    StepTime best = simulated(s, &s->best[0]), time;
    if (candidate_refused(&x, s->wish.model.V, &err)) {
        snprintf(text, size, "the trainer refuses: %s", err.text);
        return;
    }
    if (candidate_left_out(&x, &err)) {
        snprintf(text, size, "left out: %s", err.text);
        return;
    }
    candidate_memory(&x, s->wish.model.V, (size_t)s->cluster->reserve, true);
    if ((double)x.memory > s->cluster->memory) {
        snprintf(text, size, "does not fit: %.1f GiB of %.1f on stage %zu",
                 (double)x.memory / 1073741824.0, s->cluster->memory / 1073741824.0, x.fullest);
        return;
    }
    if (!step_simulate(s->cluster, &x.run, &time, &err)) {
        snprintf(text, size, "%s", err.text);
        return;
    }
    int most = 0, n = 0;
    double change[TIME_PARTS];
    for (int k = 0; k < TIME_PARTS; k++) {
        change[k] = time.parts[k] - best.parts[k];
        if (change[k] > change[most]) most = k;
    }
    double slower = time.seconds / best.seconds - 1;
    if (x.run.v != s->best[0].run.v) n = snprintf(text, size, "v = %zu, ", x.run.v);
    n += snprintf(text + n, size - (size_t)n, "%+.1f%%, %.1f GiB", 100 * slower,
                  (double)x.memory / 1073741824.0);
    if (slower > 0.0005)
        snprintf(text + n, size - (size_t)n, ": %s %+.3f s",
                 most == TIME_IDLE ? "waiting" : time_part_name((TimePart)most), change[most]);
}

// Does something fit on these GPUs when the wish is changed so?
static inline bool would_fit(const Search *s, const Wish *wish) {
    Search more = *s;
    more.wish = *wish;
    Candidate x = search_blank(&more, wish->ranks);
    for (x.run.t = 1; x.run.t <= wish->ranks && x.run.t <= wish->model.NH; x.run.t++)
        for (x.run.p = 1; x.run.p * x.run.t <= wish->ranks && x.run.p <= wish->model.L; x.run.p++)
            if (search_split(wish, &x) && search_fits(&more, x)) return true;
    return false;
}

// True if the wish can be split over n GPUs; the sequences of a data rank of the first such split
// go to *share.
static inline bool ranks_split(const Search *s, size_t n, size_t *share) {
    Candidate x = search_blank(s, n);
    for (x.run.t = 1; x.run.t <= n && x.run.t <= s->wish.model.NH; x.run.t++)
        for (x.run.p = 1; x.run.t * x.run.p <= n && x.run.p <= s->wish.model.L; x.run.p++) {
            if (s->wish.model.NH % x.run.t || !search_split(&s->wish, &x)) continue;
            *share = step_share(&x.run);
            return true;
        }
    return false;
}

// Says why there is no layout at all.
static inline void no_layout(const Search *s, char *why, size_t size) {
    const Wish *w = &s->wish;
    size_t t = w->t ? w->t : 1, p = w->p ? w->p : 1, d = w->d ? w->d : 1, product = t * p * d,
           share = 0;
    if (w->shard > 0 && !wish_allows_shards(w))
        snprintf(why, size,
                 "--shard %d is for two ranks or more, all of them data ranks with ZeRO: leave "
                 "out --tensor, "
                 "--pipeline, --virtual, --schedule, --sequence-parallel and --zero 0",
                 w->shard);
    else if ((w->shard > 0 || w->muon) && w->global_batch % w->ranks)
        snprintf(why, size,
                 "%s makes data ranks of all %zu GPUs, and the batch of %zu sequences is "
                 "no multiple of that",
                 w->muon         ? "--optimizer muon"
                 : w->shard == 2 ? "--shard 2"
                                 : "--shard 3",
                 w->ranks, w->global_batch);
    else if (s->why[0]) snprintf(why, size, "%s", s->why);
    else if (w->ranks % product || (w->t && w->p && w->d && product != w->ranks))
        snprintf(why, size,
                 "t = %zu, p = %zu, d = %zu are asked for or 1, and their product is no divisor "
                 "of %zu GPUs",
                 t, p, d, w->ranks);
    else if (w->global_batch % d)
        snprintf(why, size, "--data %zu does not divide the batch of %zu sequences", d,
                 w->global_batch);
    else {
        // The nearest numbers of GPUs that can be split at all.
        size_t below = 0, above = 0;
        for (size_t n = w->ranks; n <= SEARCH_GPUS && !above; n++)
            if (ranks_split(s, n, &share)) above = n;
        for (size_t n = w->ranks; n > 0 && !below; n--)
            if (ranks_split(s, n, &share)) below = n;
        if (above == w->ranks)
            snprintf(why, size,
                     "--micro-batch, --virtual or --schedule leaves none of a data rank's %zu "
                     "sequences and "
                     "the %zu layers",
                     share, w->model.L);
        else
            snprintf(why, size,
                     "%zu GPUs are no t x p x d with t up to the %zu heads, p up to the %zu "
                     "layers and d a "
                     "divisor of the batch of %zu; %zu and %zu GPUs are",
                     w->ranks, w->model.NH, w->model.L, w->global_batch, below, above);
    }
}

// Says, if nothing fits, which layout comes nearest, and which changes would fit.
static inline void nothing_text(const Search *s, Error *err) {
    if (!s->count && !s->too_large) {
        char why[sizeof(Error)];
        no_layout(s, why, sizeof why);
        error_set(err, "no layout of these sizes exists: %s", why);
        return;
    }
    char flags[512], would[256];
    layout_flags(flags, sizeof flags, &s->smallest);
    Wish free_recompute = s->wish, free_batch = s->wish, free_layout = s->wish;
    free_recompute.recompute = -1, free_batch.micro_batch = 0;
    free_layout.c = free_layout.e = 0;
    free_layout.t = free_layout.p = free_layout.d = free_layout.v = free_layout.micro_batch = 0;
    free_layout.schedule = free_layout.recompute = free_layout.zero =
        free_layout.sequence_parallel = -1;
    free_layout.shard = -1;
    if (s->wish.recompute >= 0 && would_fit(s, &free_recompute))
        snprintf(would, sizeof would, "recomputation would do");
    else if (s->wish.micro_batch > 1 && would_fit(s, &free_batch))
        snprintf(would, sizeof would, "a smaller micro-batch would do");
    else if (would_fit(s, &free_layout))
        snprintf(would, sizeof would, "another layout of these GPUs would do");
    else {
        size_t least = search_smallest(s);
        if (least) snprintf(would, sizeof would, "%zu GPUs would do, and no fewer", least);
        else snprintf(would, sizeof would, "no number of GPUs up to %d would do", SEARCH_GPUS);
    }
    error_set(err, "nothing fits: %s needs %.1f GiB of %.1f; %s", flags,
              (double)s->smallest.memory / 1073741824.0, s->cluster->memory / 1073741824.0,
              would);
}

#endif
