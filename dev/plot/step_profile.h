// step_profile.h: the parts of a training step, from the trace events of all ranks: compute,
// optimizer, exposed communication by kind, other idle time, and the measured pipeline bubble.
//
// Track 0 of a rank is its compute stream. Work on the other tracks (communication streams) costs
// a step nothing unless the compute stream waits for it, so the profile reads track 0 alone. Its
// spans nest: a backward holds a blocking all-reduce, a forward holds its wait for a neighbour.
//
// Each instant of a step belongs to the innermost span around it. So for one rank and one step:
//   step      = end of the last span - start of the first span, on track 0
//             = compute + optimizer + tensor + pipeline + data + other
//   compute   = forward, loss, backward, weight, less the spans inside them
//   tensor    = all-reduce, reduce-scatter, all-gather on the compute stream, and "wait tensor"
//   pipeline  = "wait pipeline" (and send or recv, should they run on the compute stream)
//   data      = "wait data"
//   other     = no span, or a span of another kind.
//
// The bubble is measured as pipeline papers draw it, between the first and the last work on
// micro-batches:
//   phase     = last end - first start of a forward, loss, backward or weight step of ANY rank in
//             this step
//   own       = the same of this rank alone
//   bubble    = phase - own + (pipeline + other inside own)
//   ideal     = phase - bubble.
// Schedules promise that bubble / ideal is (p-1)/m, or (p-1)/(v m) interleaved. The bubble
// overlaps with the parts above. Ranks that wait for the slowest of their replicas count as idle
// in it.
//
// defines: ProfilePart, StepProfile, profile_part_name, profile_steps, profile_bubble,
//          profile_mean, profile_slowest, profile_print
#ifndef DEV_PLOT_STEP_PROFILE_H
#define DEV_PLOT_STEP_PROFILE_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/host/trace.h"

typedef enum {
    PROFILE_COMPUTE,
    PROFILE_OPTIMIZER,
    PROFILE_TENSOR,
    PROFILE_PIPELINE,
    PROFILE_DATA,
    PROFILE_OTHER,
    PROFILE_PARTS
} ProfilePart;

// One rank, in milliseconds, as mean over its steps.
typedef struct {
    size_t steps;  // 0: it had none, and everything else is 0
    double wall;   // of a step; the sum of the parts
    double part[PROFILE_PARTS];
    double bubble, ideal;  // idle and working time while any rank works on micro-batches
    double own;            // from the rank's own first work on them to its own last
} StepProfile;

static inline const char *profile_part_name(int part) {
    static const char *const names[] = {"compute",  "optimizer", "tensor",
                                        "pipeline", "data",      "other"};
    return names[part];
}

static inline ProfilePart profile_part_of(const char *kind) {
    static const struct {
        const char *kind;
        ProfilePart part;
    } kinds[] = {
        {"forward", PROFILE_COMPUTE},       {"loss", PROFILE_COMPUTE},
        {"backward", PROFILE_COMPUTE},      {"weight", PROFILE_COMPUTE},
        {"optimizer", PROFILE_OPTIMIZER},   {"all-reduce", PROFILE_TENSOR},
        {"reduce-scatter", PROFILE_TENSOR}, {"all-gather", PROFILE_TENSOR},
        {"wait tensor", PROFILE_TENSOR},    {"wait pipeline", PROFILE_PIPELINE},
        {"send", PROFILE_PIPELINE},         {"recv", PROFILE_PIPELINE},
        {"wait data", PROFILE_DATA},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kind, kinds[i].kind) == 0) return kinds[i].part;
    return PROFILE_OTHER;
}

// An event of track 0; times in microseconds.
typedef struct {
    long step;
    int rank;
    ProfilePart part;
    double start, end;
} ProfileSpan;

typedef struct {
    double first, last;  // first > last: empty
} ProfileWindow;

// Orders by step, rank and start, then the longer one first: a parent comes before its children.
static inline int profile_compare(const void *a, const void *b) {
    const ProfileSpan *x = (const ProfileSpan *)a, *y = (const ProfileSpan *)b;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return x->end > y->end ? -1 : x->end < y->end;
}

// Returns the first start and the last end of the compute spans.
static inline ProfileWindow profile_window(const ProfileSpan *spans, size_t count) {
    ProfileWindow w = {INFINITY, -INFINITY};
    for (size_t i = 0; i < count; i++) {
        if (spans[i].part != PROFILE_COMPUTE) continue;
        w.first = fmin(w.first, spans[i].start);
        w.last = fmax(w.last, spans[i].end);
    }
    return w;
}

// Gives the time from..to to a part and returns how much of it is idle time inside the window.
static inline double profile_give(StepProfile *out, ProfilePart part, double from, double to,
                                  ProfileWindow w) {
    out->part[part] += to - from;
    if (part != PROFILE_PIPELINE && part != PROFILE_OTHER) return 0;
    return fmax(0, fmin(to, w.last) - fmax(from, w.first));
}

// Adds one step of one rank. spans[count] are sorted; stack has room for as many. phase: of all
// ranks.
static inline void profile_add(StepProfile *out, const ProfileSpan *spans, size_t count,
                               const ProfileSpan **stack, ProfileWindow phase) {
    ProfileWindow own = profile_window(spans, count);
    double now = spans[0].start, end = now, idle = 0;
    for (size_t i = 0; i < count; i++) end = fmax(end, spans[i].end);
    // A sweep over time: between two starts, the time belongs to the last opened span until it
    // ends, then to its parent. Clocks round, so a span may outlive its parent a little; no
    // instant is counted twice.
    size_t open = 0;
    for (size_t i = 0; i <= count; i++) {
        double until = i < count ? spans[i].start : end;
        while (now < until) {
            while (open > 0 && stack[open - 1]->end <= now) open--;
            double to = open > 0 ? fmin(stack[open - 1]->end, until) : until;
            idle +=
                profile_give(out, open > 0 ? stack[open - 1]->part : PROFILE_OTHER, now, to, own);
            now = to;
        }
        if (i < count) stack[open++] = &spans[i];
    }
    double whole = fmax(0, phase.last - phase.first), worked = fmax(0, own.last - own.first) - idle;
    out->wall += end - spans[0].start;
    out->own += fmax(0, own.last - own.first);
    out->ideal += worked;
    out->bubble += fmax(0, whole - worked);
    out->steps++;
}

// Profiles the events of ranks 0 .. ranks-1, in any order, without the steps before first_step.
// Returns false if an event has another rank, a negative duration, or absurd times.
static inline bool profile_steps(const TraceEvent *events, size_t count, int ranks,
                                 size_t first_step, StepProfile *out /*[ranks]*/) {
    if (ranks > 0) memset(out, 0, (size_t)ranks * sizeof *out);
    ProfileSpan *spans = (ProfileSpan *)host_alloc(count, sizeof *spans);
    const ProfileSpan **stack = (const ProfileSpan **)host_alloc(count, sizeof *stack);
    bool ok = true;
    size_t kept = 0;
    for (size_t i = 0; ok && i < count; i++) {
        const TraceEvent *e = &events[i];
        ok = e->rank >= 0 && e->rank < ranks && fabs(e->start_us) < 1e18 && e->duration_us >= 0 &&
             e->duration_us < 1e18;
        if (!ok || e->stream != 0 || e->step < 0 || (size_t)e->step < first_step) continue;
        ProfileSpan span = {e->step, e->rank, profile_part_of(e->kind), e->start_us,
                            e->start_us + e->duration_us};
        spans[kept++] = span;
    }
    if (ok) qsort(spans, kept, sizeof *spans, profile_compare);
    for (size_t from = 0, to; ok && from < kept; from = to) {  // a step
        for (to = from; to < kept && spans[to].step == spans[from].step;) to++;
        ProfileWindow phase = profile_window(spans + from, to - from);
        for (size_t a = from, b; a < to; a = b) {  // a rank
            for (b = a; b < to && spans[b].rank == spans[a].rank;) b++;
            profile_add(&out[spans[a].rank], spans + a, b - a, stack, phase);
        }
    }
    for (int r = 0; ok && r < ranks; r++) {
        double scale = out[r].steps ? 1e-3 / (double)out[r].steps : 0;
        out[r].wall *= scale;
        out[r].bubble *= scale;
        out[r].ideal *= scale;
        out[r].own *= scale;
        for (int part = 0; part < PROFILE_PARTS; part++) out[r].part[part] *= scale;
    }
    free(spans);
    free(stack);
    return ok;
}

// Returns idle over ideal time of the pipeline, which the formula of its schedule predicts.
static inline double profile_bubble(const StepProfile *profile) {
    return profile->ideal > 0 ? profile->bubble / profile->ideal : 0;
}

// Returns the mean over the ranks that have steps; steps is their maximum.
static inline StepProfile profile_mean(const StepProfile *profile, int ranks) {
    StepProfile mean;
    memset(&mean, 0, sizeof mean);
    int n = 0;
    for (int r = 0; r < ranks; r++) n += profile[r].steps > 0;
    for (int r = 0; r < ranks; r++) {
        if (profile[r].steps == 0) continue;
        if (profile[r].steps > mean.steps) mean.steps = profile[r].steps;
        mean.wall += profile[r].wall / n;
        mean.bubble += profile[r].bubble / n;
        mean.ideal += profile[r].ideal / n;
        mean.own += profile[r].own / n;
        for (int part = 0; part < PROFILE_PARTS; part++)
            mean.part[part] += profile[r].part[part] / n;
    }
    return mean;
}

// Returns the rank that computes longest, for which the others wait, or -1 if no rank has steps.
// *median: of the ranks' compute times, in ms.
static inline int profile_slowest(const StepProfile *profile, int ranks, double *median) {
    double *sorted = (double *)host_alloc((size_t)ranks, sizeof *sorted);
    int slowest = -1, n = 0;
    for (int r = 0; r < ranks; r++) {
        if (profile[r].steps == 0) continue;
        double x = profile[r].part[PROFILE_COMPUTE];
        if (slowest < 0 || x > profile[slowest].part[PROFILE_COMPUTE]) slowest = r;
        int at = n++;
        for (; at > 0 && sorted[at - 1] > x; at--) sorted[at] = sorted[at - 1];
        sorted[at] = x;
    }
    *median = n ? sorted[(n - 1) / 2] : 0;
    free(sorted);
    return slowest;
}

static inline void profile_print_row(FILE *file, const char *name, const StepProfile *p,
                                     int digits) {
    fprintf(file, "%4s %8.*f", name, digits, p->wall);
    for (int part = 0; part < PROFILE_PARTS; part++)
        fprintf(file, " %8.*f %5.1f", digits, p->part[part],
                p->wall > 0 ? 100 * p->part[part] / p->wall : 0);
    fprintf(file, " %9.*f %5.1f\n", digits, p->bubble, 100 * profile_bubble(p));
}

// Prints the table: a row for each rank, and their mean.
static inline void profile_print(FILE *file, const StepProfile *profile, int ranks) {
    StepProfile mean = profile_mean(profile, ranks);
    if (mean.steps == 0) {
        fprintf(file, "profile: no step to show\n");
        return;
    }
    int digits = mean.wall < 10 ? 3 : mean.wall < 1000 ? 2 : 1;
    fprintf(file, "profile, mean of %zu step%s\n", mean.steps, mean.steps > 1 ? "s" : "");
    fprintf(file, "%4s %8s", "rank", "step");
    for (int part = 0; part < PROFILE_PARTS; part++)
        fprintf(file, " %14s", profile_part_name(part));
    fprintf(file, " %15s\n%4s %8s", "bubble", "", "ms");
    for (int part = 0; part < PROFILE_PARTS; part++) fprintf(file, " %8s %5s", "ms", "%");
    fprintf(file, " %9s %5s\n", "ms", "%");
    for (int r = 0; r < ranks; r++) {
        char name[16];
        snprintf(name, sizeof name, "%d", r);
        if (profile[r].steps > 0) profile_print_row(file, name, &profile[r], digits);
    }
    profile_print_row(file, "mean", &mean, digits);
    fprintf(file,
            "Percentages are of the step; tensor, pipeline and data are communication that the "
            "compute stream "
            "waited for,\nother is idle time outside all spans, and bubble is the pipeline's "
            "idle time in "
            "percent of its working time\n(in theory (p-1)/(v m)).\n");
    double median;
    int slowest = profile_slowest(profile, ranks, &median);
    double longest = profile[slowest].part[PROFILE_COMPUTE];
    if (ranks > 1 && median > 0)
        fprintf(file,
                "%s rank %d, which computes for %.*f ms a step, %.1f times as long as the median "
                "rank.\n",
                longest > 1.2 * median ? "The others wait for" : "No rank is slow, not even",
                slowest, digits, longest, longest / median);
}

#endif
