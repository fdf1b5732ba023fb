// plan.cu: I have N GPUs and this model: which layout trains it fastest?
//
//   plan --model NAME|--layers L --heads H --channels C --seq T --vocab V  --cluster FILE|NAME
//                                                                          --gpus N --batch G
//        [--tensor t] [--pipeline p] [--data d] [--virtual v] [--micro-batch b] [--schedule NAME]
//        [--recompute none|gelu|layer] [--sequence-parallel 0|1] [--zero 0|1] [--shard 0|2|3]
//        [--replicas r] [--optimizer adamw|muon] [--order tdp]
//        [--layers-per-stage N,N,...] [--context c] [--expert-parallel e] [--capacity X]
//        [--no-v] [--light] [--json]
//
// Tries every layout that the model's trainers accept (search.h):
//   a mixture of experts        train_5d
//   a model of train_llama       train_llama
//   --optimizer muon            train_muon
//   all others                  train_gpt_3d, train_zero_bubble, train_v and train_fsdp
// It asks the trainer's own layout function for the memory (memory.h) and the simulation of
// dev/scale/step.h for the time. The trainer's own clock ranks the layouts within 5% of the best
// again, unless --light leaves that out. A flag of the layout fixes that part of it; --no-v
// leaves out chunks in a V. bf16. The question and the sentences are in words.h, which the
// explorer has too.
#define main trainer_main  // the trainers are compiled in, for trainer_clock
#include "train_gpt_3d.cu"
#include "llmc/zero_bubble.h"
namespace zero_bubble {
#include "dev/lessons/train_zero_bubble.cu"
}
#include "llmc/kernels/add.cuh"
#include "llmc/v_schedules.h"
namespace v_schedules {
#include "dev/lessons/train_v.cu"
}
#include "llmc/trainer/split_data.cuh"
namespace fsdp {
#include "dev/lessons/train_fsdp.cu"
}
#include "llmc/host/muon.h"
#include "llmc/kernels/muon.cuh"
#include "llmc/trainer/momenta.cuh"
namespace muon {
#include "dev/lessons/train_muon.cu"
}
#include "llmc/host/documents.h"
#include "llmc/host/tokenizer_kinds.h"
#include "llmc/kernels/documents.cuh"
#include "llmc/kernels/head_norm.cuh"
#include "llmc/kernels/rope.cuh"
#include "llmc/kernels/swiglu.cuh"
#include "llmc/llama.h"
namespace llama {
#include "dev/lessons/train_llama.cu"
}
#include "llmc/model_5d.h"
#include "llmc/trainer/context_ranks.cuh"
#include "llmc/trainer/expert_ranks.cuh"
#include "llmc/trainer/moe_statistics.cuh"
namespace five {
#include "dev/lessons/train_5d.cu"
}
#undef main

#include "dev/plan/muon.h"
#include "dev/plan/words.h"

#include <glob.h>
#include <sys/wait.h>

static const char *const PARTS_SHOWN[] = {"tensor", "pipeline", "data"};
static const TimePart PARTS[] = {TIME_TENSOR, TIME_PIPELINE, TIME_DATA};

static int fail(const Error *err) {
    fprintf(stderr, "error: %s\n", err->text);
    return 2;
}

static void print_counts(FILE *file, const Search *s) {
    char text[sizeof(Error) + 256];
    counts_text(s, text, sizeof text);
    fprintf(file, "%s\n", text);
}

static void print_neighbour(const Search *s, const char *what, Candidate x) {
    char text[sizeof(Error) + 64];
    neighbour_text(s, x, text, sizeof text);
    printf("  %-26s%s\n", what, text);
}

// Puts the names of dev/clusters into a line, in order; the folder is the list. Returns the one
// nearest to `name`.
static void cluster_names(const char *name, char *line, size_t size, char nearest[64]) {
    glob_t found;
    size_t n = 0;
    int least = 100;
    nearest[0] = line[0] = '\0';
    if (glob("dev/clusters/*.json", 0, NULL, &found) != 0) return;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char own[64];
        const char *file = strrchr(found.gl_pathv[i], '/') + 1;
        snprintf(own, sizeof own, "%.*s", (int)strcspn(file, "."), file);
        if (n < size) n += (size_t)snprintf(line + n, size - n, "%s%s", n ? " " : "", own);
        if (word_distance(name, own) >= least) continue;
        least = word_distance(name, own);
        strcpy(nearest, own);
    }
    globfree(&found);
}

// Reads a cluster: a file, or a name in dev/clusters.
static bool read_cluster(Cluster *cluster, char path[PATH_MAX], const char *name, Error *err) {
    char names[400], nearest[64];
    bool is_path = strchr(name, '/') || strchr(name, '.');
    if (!is_path && path_print(path, err, "dev/clusters/%s.json", name) &&
        access(path, F_OK) != 0) {
        cluster_names(name, names, sizeof names, nearest);
        bool near = word_distance(name, nearest) <= (int)strlen(name) / 3;
        return error_set(err, "there is no cluster '%.64s': %s%s%sthere are %s", name,
                         near ? "did you mean " : "", near ? nearest : "", near ? "? " : "",
                         names);
    }
    return path_print(path, err, is_path ? "%s" : "dev/clusters/%s.json", name) &&
           cluster_read(cluster, path, err);
}

// ---- the answer ------------------------------------------------------------------------

// Has the trainer of a layout simulate a step. With ZeRO it is the second step, because the first
// has no weights to gather. Returns its seconds, or 0 if the trainer does not simulate that
// number of stages.
static double trainer_clock(const Search *s, const Candidate *x, const char *cluster) {
    char flags[512], model[256], line[1024], *argv[128];
    double seconds = 0;
    int ends[2], argc = 0, status = 1, steps = x->run.zero ? 2 : 1;
    layout_flags(flags, sizeof flags, x);
    model_flags(model, sizeof model, &s->wish);
    snprintf(line, sizeof line, "train --simulate FILE --ranks %zu --steps %d %s %s",
             x->run.ranks, steps, model, flags);
    for (char *word = strtok(line, " "); word && argc < 127; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[2] = (char *)cluster, argv[argc] = NULL;
    if (pipe(ends) != 0) return 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO), dup2(ends[1], STDERR_FILENO);
        close(ends[0]), close(ends[1]);
        exit(x->run.shard           ? fsdp::trainer_main(argc, argv)
             : x->run.muon          ? muon::trainer_main(argc, argv)
             : x->run.E             ? five::trainer_main(argc, argv)
             : x->llama             ? llama::trainer_main(argc, argv)
             : step_folded(&x->run) ? v_schedules::trainer_main(argc, argv)
             : step_split(&x->run)  ? zero_bubble::trainer_main(argc, argv)
                                    : trainer_main(argc, argv));
    }
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r");
    char heard[1024];
    while (child > 0 && said && fgets(heard, sizeof heard, said))
        if (sscanf(heard, "step %lf s |", &seconds) != 1) continue;
    if (said) fclose(said);
    if (child > 0) waitpid(child, &status, 0);
    return status == 0 ? seconds : 0;
}

// True if the trainer's clock answers for a layout within seconds. train_5d simulates c ranks of
// each stage, and each of its experts' products.
static bool clock_is_quick(const Candidate *x, size_t number) {
    return x->run.E == 0 || (number < 3 && x->run.p * x->run.c <= 16);
}

// Ranks the best layouts, within RANKED of the best one, by the trainer's own clock. The others
// keep the light simulation's time, and so do layouts that the clock does not simulate.
static void rank_by_clock(Search *s, const char *cluster) {
    const double RANKED = 1.05;
    double limit = RANKED * s->best[0].seconds;
    for (size_t i = 0; i < s->found; i++) {
        if (s->progress)
            fprintf(stderr, "\rthe trainer's clock: %zu of %zu layouts \033[K", i, s->found);
        Candidate x = s->best[i];
        if (clock_is_quick(&x, i) && x.seconds <= limit) x.clock = trainer_clock(s, &x, cluster);
        size_t at = i;
        double mine = x.clock > 0 ? x.clock : x.seconds;
        for (; at > 0; at--) {
            const Candidate *before = &s->best[at - 1];
            if ((before->clock > 0 ? before->clock : before->seconds) <= mine) break;
            s->best[at] = *before;
        }
        s->best[at] = x;
    }
    if (s->progress) fprintf(stderr, "\r\033[K");
}

static void print_best(const Search *s) {
    const Wish *w = &s->wish;
    bool clock = false;
    for (size_t i = 0; i < s->found; i++) clock = clock || s->best[i].clock > 0;
    printf("%s   step s  tokens/s   MFU    GiB   idle tensor  pipel.   data  layout\n",
           clock ? "  clock s" : "");
    for (size_t i = 0; i < s->found; i++) {
        const Candidate *x = &s->best[i];
        StepTime time = simulated(s, x);
        char flags[512];
        layout_flags(flags, sizeof flags, x);
        if (clock && x->clock > 0) printf("%9.3f", x->clock);
        else if (clock) printf("%9s", "-");
        printf("%9.3f %9.0f %4.1f%% %6.1f", x->seconds,
               (double)(w->global_batch * w->T) / x->seconds, 100 * mfu(s, x),
               (double)x->memory / 1073741824.0);
        printf(" %5.1f%%", 100 * fmax(0.0, time.parts[TIME_IDLE]) / time.seconds);
        for (int k = 0; k < 3; k++) printf(" %5.1f%%", 100 * time.parts[PARTS[k]] / time.seconds);
        printf("  %s\n", flags);
    }
    printf(
        "Shares of the step on the stage that computes most: idle, and exposed tensor, pipeline "
        "and data "
        "communication.\nGiB: of the largest stage, incl. %.1f for libraries\n%s"
        "published GPU runs of this size take %+.0f to %+.0f%% longer than predicted\n",
        s->cluster->reserve / 1073741824.0,
        clock ? "clock s: by the trainer's own simulation, which ranks what is within 5% of the "
                "best; all else by "
                "the light one\n"
              : "",
        cost_band((double)w->ranks)[0], cost_band((double)w->ranks)[1]);
}

static void print_command(const Search *s, const char *path) {
    const Wish *w = &s->wish;
    char flags[512];
    layout_flags(flags, sizeof flags, &s->best[0]);
    char model[256];
    model_flags(model, sizeof model, w);
    const StepLayout *best = &s->best[0].run;
    const char *trainer = best->shard        ? "train_fsdp"
                          : best->muon       ? "train_muon"
                          : best->E         ? "train_5d"
                          : s->wish.llama   ? "train_llama"
                          : step_folded(best) ? "train_v"
                          : step_split(best) ? "train_zero_bubble" : "train_gpt_3d";
    printf("\ntrain: mpirun -n %zu build/cuda-bf16/%s --train-data 'data/train_*.bin' %s %s\n",
           w->ranks, trainer, model, flags);
    printf("simulate: build/cpu-bf16/%s --simulate %s --ranks %zu --steps 2 %s %s\n", trainer,
           path, w->ranks, model, flags);
}

// Sets the most chunks, not more than now, that the layers and micro-batches of a changed layout
// divide into.
static void take_chunks(StepLayout *r) {
    size_t m = step_micros(r);
    if (r->schedule != SCHEDULE_INTERLEAVED && r->p > 1) return;
    while (r->v > 1 && (r->p == 1 || r->layers % (r->p * r->v) || m % r->p)) r->v--;
    if (r->v == 1) r->schedule = SCHEDULE_1F1B;
}

static size_t product(const StepLayout *r) { return r->t * r->p * r->d; }

// Prints the best layout under FSDP beside one of a grid, or the reverse, if the wish leaves the
// choice.
static void print_other_kind(const Search *s) {
    Search other;
    memset(&other, 0, sizeof other);
    other.cluster = s->cluster, other.wish = s->wish;
    if (s->wish.shard != -1 || !wish_allows_shards(&s->wish)) return;
    other.wish.shard = s->best[0].run.shard ? 0 : (int)WISH_SHARDED;
    search_layouts(&other);
    char flags[512];
    const char *what = other.wish.shard ? "FSDP" : "no FSDP";
    const Candidate *x = other.found ? &other.best[0] : &other.smallest;
    if (x->memory) {
        print_neighbour(s, what, *x);
        layout_flags(flags, sizeof flags, x);
        printf("  %26s%s\n", "at best: ", flags);
    } else
        printf("  %-26s%s\n", what,
               other.why[0] ? other.why : "no such layout divides the GPUs and the batch");
    search_free(&other);
}

// Prints the best layout with Muon beside one with AdamW, or the reverse.
static void print_other_optimizer(const Search *s) {
    Search other;
    memset(&other, 0, sizeof other);
    other.cluster = s->cluster, other.wish = s->wish;
    other.wish.muon = !s->wish.muon;
    if (!wish_allows_muon(&s->wish)) return;
    search_layouts(&other);
    const Candidate *x = other.found ? &other.best[0] : &other.smallest;
    if (x->memory) print_neighbour(s, other.wish.muon ? "Muon" : "AdamW", *x);
    search_free(&other);
}

// Prints the traffic of the five dimensions of a mixture's layout, and the purpose of c and e.
static void print_dimensions(const Search *s) {
    const Candidate *b = &s->best[0];
    const StepLayout *r = &b->run;
    if (!r->E) return;
    DimensionCost costs[DIMENSIONS];
    dimension_costs(s, b, costs);
    double GiB = 1073741824.0, experts = 6 * step_experts(r, 0);
    printf("\nfive dimensions: what a rank sends in a layer's forward, with a micro-batch of %zu "
           "tokens on it\n",
           r->micro_batch * step_tokens(r));
    for (int i = 0; i < DIMENSIONS; i++) {
        printf("  %c = %-5zu %10.1f MB %9.3f ms  ", costs[i].name, costs[i].size,
               costs[i].bytes / 1e6, 1e3 * costs[i].seconds);
        switch (costs[i].name) {
            case 't': printf("activations, four times\n"); break;
            case 'c':
                printf("keys and values; a rank has %zu of %zu tokens of a sequence\n",
                       step_tokens(r), r->T);
                break;
            case 'e':
                printf("tokens of %zu places to experts and back; a rank has %zu of %zu experts, "
                       "%.1f GiB with their gradients, and would have %.1f with e = 1\n",
                       r->micro_batch * r->E * step_places(r), r->E / r->e, r->E, experts / GiB,
                       experts * (double)r->e / GiB);
                break;
            case 'p': printf("activations, behind the last layer of a stage\n"); break;
            default: printf("gradients and weights, once a step\n");
        }
    }
}

// Layouts that differ from the best one in one decision.
static void print_neighbours(const Search *s) {
    const Candidate *b = &s->best[0];
    static const struct { const char *what; double t, p, d, micro_batch, c, e;
    } moves[] = {
        {"twice t, half p", 2, 0.5, 1, 1, 1, 1},   {"twice t, half d", 2, 1, 0.5, 1, 1, 1},
        {"half t, twice p", 0.5, 2, 1, 1, 1, 1},   {"half t, twice d", 0.5, 1, 2, 1, 1, 1},
        {"twice p, half d", 1, 2, 0.5, 1, 1, 1},   {"half p, twice d", 1, 0.5, 2, 1, 1, 1},
        {"micro-batch twice", 1, 1, 1, 2, 1, 1},   {"micro-batch half", 1, 1, 1, 0.5, 1, 1},
        {"twice c", 1, 1, 1, 1, 2, 1},             {"half c", 1, 1, 1, 1, 0.5, 1},
        {"twice c, micro-batch too", 1, 1, 1, 2, 2, 1},
        {"twice e", 1, 1, 1, 1, 1, 2},             {"half e", 1, 1, 1, 1, 1, 0.5}};
    printf("\nwhy not\n");
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++) {
        Candidate x = *b;
        StepLayout *r = &x.run;
        r->t = (size_t)((double)r->t * moves[i].t), r->p = (size_t)((double)r->p * moves[i].p);
        r->d = (size_t)((double)r->d * moves[i].d);
        r->micro_batch = (size_t)((double)r->micro_batch * moves[i].micro_batch);
        r->c = (size_t)((double)r->c * moves[i].c), r->e = (size_t)((double)r->e * moves[i].e);
        bool cut = moves[i].c != 1 || moves[i].e != 1;
        if (product(r) != r->ranks || r->micro_batch == 0 || (r->muon && r->t * r->p > 1) ||
            (cut && (!r->E || !r->c || !r->e)) || r->d % r->c || step_share(r) % r->micro_batch)
            continue;
        if (r->t == 1) r->sequence_parallel = false;
        if (r->d == 1) r->zero = false;
        if (r->t * r->p > 1) {
            r->shard = 0;
            r->replicas = 0;
        }
        if (r->p != b->run.p) r->stages[0] = 0;
        take_chunks(r);
        print_neighbour(s, moves[i].what, x);
    }
    for (int k = RECOMPUTE_NONE; k <= RECOMPUTE_LAYER; k++) {
        Candidate x = *b;
        char what[64];
        snprintf(what, sizeof what, "recompute %s", RECOMPUTE_NAMES[k]);
        candidate_recompute(&x, k);
        if (k != b->recompute) print_neighbour(s, what, x);
    }
    int last = b->llama ? SCHEDULE_INTERLEAVED : SCHEDULE_DUALPIPE_V;
    for (int k = SCHEDULE_GPIPE; k <= last && b->run.p > 1; k++) {
        if (k == SCHEDULE_ZB_AUTO) continue;
        Candidate x = *b;
        x.run.schedule = (Schedule)k;
        x.run.v = k == SCHEDULE_INTERLEAVED || step_folded(&x.run) ? 2 : 1;
        x.run.max_in_flight = 0;
        if (x.run.schedule != b->run.schedule)
            print_neighbour(s, pipeline_schedule_name(x.run.schedule), x);
    }
    Candidate x = *b;
    x.run.sequence_parallel = !b->run.sequence_parallel;
    if (b->run.t > 1)
        print_neighbour(
            s, b->run.sequence_parallel ? "no sequence parallelism" : "sequence parallelism", x);
    x = *b;
    x.run.zero = !b->run.zero;
    if (b->run.d > 1 && !b->run.shard && !b->run.muon)
        print_neighbour(s, b->run.zero ? "no ZeRO" : "ZeRO", x);
    x = *b;
    x.run.stages[0] = 0;
    if (b->run.stages[0] && !s->wish.stages) print_neighbour(s, "equal stages", x);
    x = *b;
    x.run.capacity = 0;
    if (b->run.E && b->run.capacity > 0) print_neighbour(s, "drop no token", x);
    print_other_kind(s);
    print_other_optimizer(s);
    if (b->run.shard || b->run.muon) return;
    for (int i = 0; i < ORDER_COUNT; i++) {
        char what[64];
        x = *b;
        strcpy(x.run.order, ORDERS[i]);
        snprintf(what, sizeof what, "order %s", ORDERS[i]);
        bool other = strcmp(ORDERS[i], b->run.order) != 0 &&
                     !order_is_double(s->cluster, &b->run, i);
        if (other) print_neighbour(s, what, x);
    }
}

static void print_json(const Search *s) {
    const Wish *w = &s->wish;
    cJSON *root = cJSON_CreateObject(), *best = cJSON_AddArrayToObject(root, "best");
    const struct { const char *name; size_t value;
    } sizes[] = {{"gpus", w->ranks},          {"global_batch", w->global_batch},
                 {"layers", w->model.L},      {"heads", w->model.NH},
                 {"channels", w->model.C},    {"seq", w->T},
                 {"vocab", w->model.V},       {"refused", s->refused},
                 {"too_large", s->too_large}, {"simulated", s->simulated},
                 {"beaten", s->beaten}};
    cJSON_AddStringToObject(root, "cluster", s->cluster->name);
    cJSON_AddNumberToObject(root, "published_low_percent", cost_band((double)w->ranks)[0]);
    cJSON_AddNumberToObject(root, "published_high_percent", cost_band((double)w->ranks)[1]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        cJSON_AddNumberToObject(root, sizes[i].name, (double)sizes[i].value);
    for (size_t i = 0; i < s->found; i++) {
        const Candidate *x = &s->best[i];
        const StepLayout *r = &x->run;
        StepTime time = simulated(s, x);
        cJSON *row = cJSON_CreateObject();
        char flags[512];
        layout_flags(flags, sizeof flags, x);
        cJSON_AddStringToObject(row, "flags", flags);
        cJSON_AddNumberToObject(row, "tensor", (double)r->t),
            cJSON_AddNumberToObject(row, "pipeline", (double)r->p);
        cJSON_AddNumberToObject(row, "data", (double)r->d),
            cJSON_AddNumberToObject(row, "virtual", (double)r->v);
        if (r->E) cJSON_AddNumberToObject(row, "context", (double)r->c);
        if (r->E) cJSON_AddNumberToObject(row, "expert_parallel", (double)r->e);
        if (r->E) cJSON_AddNumberToObject(row, "capacity", r->capacity);
        cJSON_AddNumberToObject(row, "micro_batch", (double)r->micro_batch);
        cJSON_AddStringToObject(row, "schedule", pipeline_schedule_name(r->schedule));
        cJSON_AddStringToObject(row, "recompute", RECOMPUTE_NAMES[x->recompute]);
        cJSON_AddBoolToObject(row, "sequence_parallel", r->sequence_parallel);
        cJSON_AddBoolToObject(row, "zero", r->zero);
        cJSON_AddNumberToObject(row, "shard", (double)r->shard);
        cJSON_AddNumberToObject(row, "replicas", (double)r->replicas);
        cJSON_AddStringToObject(row, "optimizer", r->muon ? "muon" : "adamw");
        cJSON_AddStringToObject(row, "order", r->order);
        cJSON_AddNumberToObject(row, "step_seconds", x->seconds);
        cJSON_AddNumberToObject(row, "clock_seconds", x->clock);
        cJSON_AddNumberToObject(row, "mfu", mfu(s, x));
        cJSON_AddNumberToObject(row, "memory_bytes", (double)x->memory);
        cJSON_AddNumberToObject(row, "idle_seconds", time.parts[TIME_IDLE]);
        for (int k = 0; k < 3; k++)
            cJSON_AddNumberToObject(row, PARTS_SHOWN[k], time.parts[PARTS[k]]);
        cJSON_AddItemToArray(best, row);
    }
    char *text = cJSON_Print(root);
    if (text) puts(text);
    free(text);
    cJSON_Delete(root);
}

int main(int argc, char **argv) {
    Error err = {""};
    Cluster cluster;
    Search s;
    const char *name = NULL;
    char path[PATH_MAX];
    bool json = false, light = false;
    memset(&s, 0, sizeof s);
    static const char usage[] =
        "usage: plan --model NAME --cluster FILE|NAME --gpus N --batch G [--no-v] [--light] "
        "[--json]\n"
        "sizes of a model: --layers --heads --channels --seq --vocab\n"
        "to fix a part of the layout: --tensor --pipeline --data --virtual --micro-batch "
        "--schedule --recompute --sequence-parallel\n"
        "    --zero --shard --replicas --optimizer --order --layers-per-stage\n"
        "    --context --expert-parallel --capacity, of a mixture of experts\n";
    if (argc == 1 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        printf("%smodels: ", usage);
        model_names(stdout);
        printf("\n");
        return argc == 1 ? 2 : 0;
    }
    tool_begin(argc, argv, usage);
    if (!read_wish(&s.wish, &name, &json, &light, argc, argv, &err) ||
        !read_cluster(&cluster, path, name, &err))
        return fail(&err);
    s.cluster = &cluster;
    s.progress = isatty(STDERR_FILENO);
    search_layouts(&s);
    if (!s.found) {
        print_counts(stderr, &s);
        nothing_text(&s, &err);
        search_free(&s);
        fprintf(stderr, "error: %s\n", err.text);
        return 1;
    }
    if (!light) rank_by_clock(&s, path);
    if (json) print_json(&s);
    else {
        print_counts(stdout, &s);
        print_best(&s);
        print_dimensions(&s);
        print_neighbours(&s);
        print_command(&s, path);
    }
    search_free(&s);
    return 0;
}
