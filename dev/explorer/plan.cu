// plan.cu: the planner, for the page: the time of a layout on a described cluster, what its
// neighbours would take, and the fastest layouts. It compiles the planner's own headers with the
// stubs of device.h and files.h.
#include "files.h"

#define free heap_free  // a search takes and frees memory for each of thousands of layouts

// A cluster's constants come from the page, which build.sh gives those of dev/clusters. No file
// is read.
#define LLMC_JSON_H
#include "llmc/host/field.h"
typedef struct cJSON {
    struct cJSON *next;
    const char *string, *valuestring;
    double valuedouble;
} cJSON;
#define cJSON_ArrayForEach(item, list) for ((item) = (list); (item); (item) = (item)->next)
DOES_NOTHING(bool, cJSON_IsObject, true)
DOES_NOTHING(bool, cJSON_IsString, true)
DOES_NOTHING(void, cJSON_Delete, )
DOES_NOTHING(cJSON *, json_read, NULL)
DOES_NOTHING(bool, json_set_field, true)

#include "llmc/zero_bubble.h"
#define main static unused_main
#include "train_gpt_3d.cu"
namespace zero_bubble {
#include "dev/lessons/train_zero_bubble.cu"
}
#include "llmc/kernels/add.cuh"
namespace fsdp {
#include "dev/lessons/train_fsdp.cu"
}
#include "llama.h"
#undef main
static inline void trainer_leave(Trainer *) {}

#define PLAN_WITHOUT_V  // the page's layouts are those of three trainers: not train_v,
#define PLAN_WITHOUT_EXPERTS  // and not train_5d
#include "dev/plan/words.h"

// Returns nothing: the page has no Muon.
static StageMemory candidate_muon(const Candidate *, size_t) { return {}; }

// One layout for the page: its sizes, its memory and the time of its step.
typedef struct {
    double t, d, p, v, micro_batch, schedule, max_in_flight, recompute, sequence_parallel, zero,
        shard, order;
    double seconds, memory, fullest, mfu, slowest, parts[TIME_PARTS];
} PlanRow;

enum { PLAN_WORDS = 64 };
extern "C" {
char plan_text[1 << 14];  // the page's question, and a sentence for it
}
static Cluster cluster;
static PlanRow rows[SEARCH_BEST];
static Search asked;
static Candidate base;  // of plan_time

static void refuse(const char *sentence) {
    stderr_text[0] = 0;
    fprintf(stderr, "%s", sentence);
    exit(1);
}

// Sets the cluster's constants from plan_text: "name value name value".
extern "C" void plan_cluster() {
    const FieldTable table = {CLUSTER_FIELDS, CLUSTER_FIELD_COUNT, &cluster};
    memset(&cluster, 0, sizeof cluster);
    for (char *at = plan_text; *at;) {
        char *name = at, *value = at + strcspn(at, " ");
        *value++ = 0;
        at = value + strcspn(value, " ");
        if (*at) *at++ = 0;
        void *object;
        const Field *f = fields_find(&table, 1, name, &object);
        if (!f || !field_set(&cluster, f, value)) refuse(name);
    }
}

// Makes a wish of the planner's flags in plan_text.
static Search *wish() {
    char *words[PLAN_WORDS];
    const char *name = NULL;
    static char program[] = "plan";
    int count = 0;
    bool json = false, light = true;
    Error err;
    words[count++] = program;
    for (char *at = plan_text; *at && count < PLAN_WORDS;) {
        words[count++] = at;
        at += strcspn(at, " ");
        while (*at == ' ') *at++ = 0;
    }
    memset(&asked, 0, sizeof asked);
    asked.cluster = &cluster;
    stderr_text[0] = 0;
    if (!read_wish(&asked.wish, &name, &json, &light, count, words, &err)) refuse(err.text);
    asked.wish.no_v = true;
    return &asked;
}

static void set_row(PlanRow *row, const Search *s, const Candidate *x) {
    const StepLayout *r = &x->run;
    StepTime time = simulated(s, x);
    *row = {(double)r->t,
            (double)r->d,
            (double)r->p,
            (double)r->v,
            (double)r->micro_batch,
            (double)r->schedule,
            (double)r->max_in_flight,
            (double)x->recompute,
            (double)r->sequence_parallel,
            (double)r->zero,
            (double)r->shard,
            (double)order_number(r->order),
            x->seconds,
            (double)x->memory,
            (double)x->fullest,
            mfu(s, x),
            (double)time.slowest,
            {}};
    memcpy(row->parts, time.parts, sizeof row->parts);
}

// Returns the layout of the flags in plan_text.
static Candidate layout_asked(double max_in_flight) {
    Candidate x = wish_candidate(wish(), (size_t)max_in_flight);
    Error err;
    if (candidate_refused(&x, asked.wish.model.V, &err)) refuse(err.text);
    return x;
}

// Returns the memory and the time of that layout, whether or not it fits.
extern "C" const PlanRow *plan_time(double max_in_flight) {
    Candidate x = layout_asked(max_in_flight);
    candidate_memory(&x, asked.wish.model.V, (size_t)cluster.reserve, true);
    x.seconds = simulated(&asked, &x).seconds;
    base = x;
    set_row(rows, &asked, &x);
    return rows;
}

// Says in plan_text how a layout does beside that of plan_time.
extern "C" void plan_beside(double max_in_flight) {
    Candidate x = wish_candidate(wish(), (size_t)max_in_flight);
    asked.best[0] = base;
    neighbour_text(&asked, x, plan_text, sizeof plan_text);
}

// Searches for the fastest layouts of the wish in plan_text. Returns their number; plan_rows has
// them, and plan_text says what became of all others, or why there is none.
extern "C" int plan_search() {
    Search *s = wish();
    s->progress = true;
    search_layouts(s);
    for (size_t i = 0; i < s->found; i++) set_row(&rows[i], s, &s->best[i]);
    counts_text(s, plan_text, sizeof plan_text);
    if (!s->found) {
        Error err;
        nothing_text(s, &err);
        refuse(err.text);
    }
    return (int)s->found;
}
extern "C" const PlanRow *plan_rows() { return rows; }

// Puts the flags of such a layout into plan_text.
extern "C" void plan_flags(int row) { layout_flags(plan_text, sizeof plan_text, &asked.best[row]); }
