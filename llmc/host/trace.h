// trace.h: a timeline as Chrome trace JSON (chrome://tracing, Perfetto): a process a rank, a track a stream.
//
// defines: TraceEvent, TraceList, trace_event, trace_add, trace_free, trace_shorten, trace_settle, trace_color,
//          trace_write
#ifndef LLMC_TRACE_H
#define LLMC_TRACE_H

#include <math.h>

#include "llmc/host/file.h"

// What ran on one stream of one rank. Plain bytes, so that ranks can send their events as they are.
typedef struct {
    char kind[24];  // "forward", "backward", "send", "recv", "all-reduce", "optimizer", ...
    int rank, stream;
    int micro, chunk;  // micro-batch and model chunk that it worked on; -1: none
    long step;
    double start_us, duration_us;
} TraceEvent;

typedef struct {
    TraceEvent *events;  // [count]
    size_t count, capacity;
} TraceList;

// An event whose step and times are still 0.
static inline TraceEvent trace_event(const char *kind, int rank, int stream, int micro, int chunk) {
    TraceEvent event;
    memset(&event, 0, sizeof event);
    snprintf(event.kind, sizeof event.kind, "%s", kind);
    event.rank = rank;
    event.stream = stream;
    event.micro = micro;
    event.chunk = chunk;
    return event;
}

static inline void trace_add(TraceList *list, const TraceEvent *event) {
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 1024;
        list->events = (TraceEvent *)host_resize(list->events, list->capacity, sizeof(TraceEvent));
    }
    list->events[list->count++] = *event;
}

static inline void trace_free(TraceList *list) {
    free(list->events);
    memset(list, 0, sizeof *list);
}

// Makes a long trace shorter: first without waits that lasted less than a nanosecond, then, if it has more than `most`
// events, without the collectives inside forwards and backwards. Returns how many events it left out.
static inline size_t trace_shorten(TraceList *list, size_t most) {
    size_t before = list->count;
    for (int pass = 0; pass < 2 && (pass == 0 || list->count > most); pass++) {
        size_t kept = 0;
        for (size_t i = 0; i < list->count; i++) {
            const TraceEvent *e = &list->events[i];
            bool wait = strncmp(e->kind, "wait", 4) == 0 && e->duration_us < 1e-3;
            bool inside = e->stream < 2 && (strncmp(e->kind, "all-", 4) == 0 || strcmp(e->kind, "reduce-scatter") == 0);
            if (pass == 0 ? !wait : !inside) list->events[kept++] = *e;
        }
        list->count = kept;
    }
    return before - list->count;
}

// By rank, stream and start; of those that start together the longest first.
static inline int trace_order(const void *a, const void *b) {
    const TraceEvent *x = (const TraceEvent *)a, *y = (const TraceEvent *)b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->stream != y->stream) return x->stream < y->stream ? -1 : 1;
    if (x->start_us != y->start_us) return x->start_us < y->start_us ? -1 : 1;
    return (x->duration_us < y->duration_us) - (x->duration_us > y->duration_us);
}

// An event that starts before another one of its track has ended must end before it too, else viewers drop it. Of what
// runs on a stream that is so; but times are measured as floats, so late in a trace neighbours seem to overlap by some
// microseconds. Sorts the events, brings them to whole nanoseconds, and lets such neighbours touch.
static inline void trace_settle(TraceList *list) {
    enum { DEEPEST = 64 };
    double ends[DEEPEST];  // of the events around this one, in ns
    size_t depth = 0;
    qsort(list->events, list->count, sizeof *list->events, trace_order);
    for (size_t i = 0; i < list->count; i++) {
        TraceEvent *e = &list->events[i];
        if (i == 0 || e->rank != e[-1].rank || e->stream != e[-1].stream) depth = 0;
        double begin = rint(1e3 * e->start_us), end = rint(1e3 * (e->start_us + e->duration_us));
        double rounding = 2 + 2.5e-7 * begin;
        while (depth > 0) {
            double before = ends[depth - 1];
            if (before > begin && (before >= end || before > begin + rounding)) break;  // this one is inside
            begin = fmax(begin, before);
            depth--;
        }
        if (depth > 0) end = fmin(end, ends[depth - 1]);
        e->start_us = 1e-3 * begin, e->duration_us = 1e-3 * fmax(end - begin, 0);
        if (depth < DEEPEST) ends[depth++] = fmax(begin, end);
    }
}

// The colour of a kind, by its name in the viewer's palette.
static inline const char *trace_color(const char *kind) {
    static const char *const colors[][2] = {
        {"forward", "thread_state_running"},
        {"backward", "rail_response"},
        {"weight", "rail_load"},
        {"send", "thread_state_iowait"},
        {"recv", "rail_idle"},
        {"optimizer", "thread_state_runnable"},
    };
    for (size_t i = 0; i < sizeof colors / sizeof colors[0]; i++) {
        if (strcmp(kind, colors[i][0]) == 0) return colors[i][1];
    }
    return "generic_work";
}

// Writes a JSON string with its quotes.
static inline void trace_string(FILE *file, const char *text) {
    fputc('"', file);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') fprintf(file, "\\%c", c);
        else if (c < 0x20 || c >= 0x7f) fprintf(file, "\\u%04x", c);
        else fputc(c, file);
    }
    fputc('"', file);
}

// Names a process (stream < 0) or one of its threads, and gives its place in the viewer.
static inline void trace_name(FILE *file, int rank, int stream, const char *name) {
    const char *what = stream < 0 ? "process" : "thread";
    int thread = stream < 0 ? 0 : stream, order = stream < 0 ? rank : stream;
    fprintf(file, "{\"name\":\"%s_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", what, rank,
            thread);
    trace_string(file, name);
    fprintf(file, "}},\n{\"name\":\"%s_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,", what, rank, thread);
    fprintf(file, "\"args\":{\"sort_index\":%d}}", order);
}

// Writes the events of all ranks. streams: the names of tracks 0 .. stream_count - 1, the same on every rank.
static inline bool trace_write(const char *path, const TraceEvent *events, size_t count,
                               const char *const *streams, int stream_count, Error *err) {
    FILE *file = file_open_output(path, O_TRUNC, err);
    if (!file) return false;
    int ranks = 0;
    for (size_t i = 0; i < count; i++) {
        if (events[i].rank >= ranks) ranks = events[i].rank + 1;
    }
    fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    const char *separator = "\n";
    bool *there = (bool *)host_alloc((size_t)ranks, sizeof(bool));
    for (size_t i = 0; i < count; i++) there[events[i].rank] = true;
    for (int rank = 0; rank < ranks; rank++) {
        char name[32];
        if (!there[rank]) continue;
        snprintf(name, sizeof name, "rank %d", rank);
        fputs(separator, file);
        separator = ",\n";
        trace_name(file, rank, -1, name);
        for (int stream = 0; stream < stream_count; stream++) {
            fputs(separator, file);
            trace_name(file, rank, stream, streams[stream]);
        }
    }
    free(there);
    for (size_t i = 0; i < count; i++) {
        const TraceEvent *e = &events[i];
        char name[48];
        if (e->micro < 0) snprintf(name, sizeof name, "%s", e->kind);
        else snprintf(name, sizeof name, "%s %d", e->kind, e->micro);
        fprintf(file, "%s{\"name\":", separator);
        trace_string(file, name);
        fprintf(file, ",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,", e->start_us,
                e->duration_us, e->rank, e->stream);
        fprintf(file, "\"cname\":\"%s\",\"args\":{\"kind\":", trace_color(e->kind));
        trace_string(file, e->kind);
        fprintf(file, ",\"micro\":%d,\"chunk\":%d,\"step\":%ld}}", e->micro, e->chunk, e->step);
    }
    fprintf(file, "\n]}\n");
    bool failed = ferror(file) | (fclose(file) != 0);
    return failed ? error_set(err, "cannot write trace %s: %s", path, strerror(errno)) : true;
}

#endif
