// trace.h: a timeline as Chrome trace JSON (chrome://tracing, Perfetto): a process for each
// rank, a track for each stream.
//
// defines: TRACE_START, TraceEvent, TraceList, trace_event, trace_add, trace_order,
//          trace_write
#ifndef LLMC_TRACE_H
#define LLMC_TRACE_H


#include "llmc/host/file.h"

#define TRACE_START "{\"displayTimeUnit\":\"ms\",\"traceEvents\":["

// Work on one stream of one rank. Plain bytes, so that ranks can send their events as they
// are.
typedef struct {
    char kind[24];  // "forward", "backward", "send", "recv", "all-reduce", "optimizer", ...
    int rank, stream;
    int micro, chunk;  // micro-batch and model chunk that it worked on; -1: none
    long step;
    double start_us, duration_us;
} TraceEvent;

typedef struct {
    TraceEvent *events;  // [count]
    size_t count;
} TraceList;

// Returns an event whose step and times are still 0.
static inline TraceEvent trace_event(const char *kind, int rank, int stream, int micro,
                                     int chunk) {
    TraceEvent event = {"", rank, stream, micro, chunk, 0, 0.0, 0.0};
    snprintf(event.kind, sizeof event.kind, "%s", kind);
    return event;
}

static inline void trace_add(TraceList *list, const TraceEvent *event) {
    list->events =
        (TraceEvent *)host_resize(list->events, list->count + 1, sizeof(TraceEvent));
    list->events[list->count++] = *event;
}

// Orders by rank, stream and start; of events that start together the longest comes first.
static inline int trace_order(const void *a, const void *b) {
    const TraceEvent *x = (const TraceEvent *)a, *y = (const TraceEvent *)b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->stream != y->stream) return x->stream < y->stream ? -1 : 1;
    if (x->start_us != y->start_us) return x->start_us < y->start_us ? -1 : 1;
    return (x->duration_us < y->duration_us) - (x->duration_us > y->duration_us);
}

// Names a process or one of its threads, and gives its place in the viewer.
static inline void trace_name(FILE *file, const char *object, int rank, int stream,
                              int place, const char *name) {
    fprintf(file,
            ",\n{\"name\":\"%s_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{"
            "\"name\":\"%s\"}}",
            object, rank, stream, name);
    fprintf(file,
            ",\n{\"name\":\"%s_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{"
            "\"sort_index\":%d}}",
            object, rank, stream, place);
}

// Writes the events of all ranks, one after the other. streams: the names of tracks 0 ..
// stream_count - 1, the same on every rank.
static inline bool trace_write(const char *path, const TraceEvent *events, size_t count,
                               const char *const *streams, int stream_count, Error *err) {
    FILE *file = file_open_output(path, O_WRONLY | O_TRUNC, err);
    if (!file) return false;
    char name[48];
    fprintf(file, TRACE_START);
    for (size_t i = 0; i < count; i++) {
        const TraceEvent *e = &events[i];
        snprintf(name, sizeof name, e->micro < 0 ? "%s" : "%s %d", e->kind, e->micro);
        fprintf(file, "%s\n{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,",
                i ? "," : "", name, e->start_us, e->duration_us);
        fprintf(file,
                "\"pid\":%d,\"tid\":%d,\"args\":{\"kind\":\"%s\",\"micro\":%d,\"chunk\":%d,"
                "\"step\":%ld}}",
                e->rank, e->stream, e->kind, e->micro, e->chunk, e->step);
        if (i > 0 && e->rank == e[-1].rank) continue;
        snprintf(name, sizeof name, "rank %d", e->rank);
        trace_name(file, "process", e->rank, 0, e->rank, name);
        for (int t = 0; t < stream_count; t++)
            trace_name(file, "thread", e->rank, t, t, streams[t]);
    }
    fprintf(file, "\n]}\n");
    bool failed = ferror(file) | (fclose(file) != 0);
    return failed ? error_set(err, "cannot write trace %s: %s", path, strerror(errno))
                  : true;
}

#endif
