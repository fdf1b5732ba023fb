// trace_read.h: reads the events of a Chrome trace back, as llmc/host/trace.h writes it.
#ifndef LLMC_TRACE_READ_H
#define LLMC_TRACE_READ_H

#include <cjson/cJSON.h>
#include <math.h>

#include "dev/plot/svg.h"
#include "llmc/host/trace.h"

static inline void trace_free(TraceList *list) {
    free(list->events);
    memset(list, 0, sizeof *list);
}

static inline double trace_number(const cJSON *object, const char *name, double missing) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) && isfinite(item->valuedouble) ? item->valuedouble : missing;
}

// Returns a number from 0 to below limit, else -1.
static inline long trace_index(const cJSON *object, const char *name, double limit) {
    double x = trace_number(object, name, -1);
    return x >= 0 && x < limit ? (long)x : -1;
}

// Appends every complete event that has a kind, a rank and sane times; other events are passed
// over. False with an error message if the file is not such a trace or holds none of them. Release
// with trace_free in either case.
static inline bool trace_read(const char *path, TraceList *list, Error *err) {
    size_t bytes;
    char *text = file_read(path, SIZE_MAX, &bytes, err);
    if (!text) return false;
    cJSON *root = cJSON_Parse(text);
    free(text);
    const cJSON *item, *events = root;
    if (!cJSON_IsArray(root)) events = cJSON_GetObjectItemCaseSensitive(root, "traceEvents");
    if (!cJSON_IsArray(events)) {
        cJSON_Delete(root);
        return error_set(err, "%s is not a Chrome trace: no traceEvents", path);
    }
    cJSON_ArrayForEach(item, events) {
        const cJSON *args = cJSON_GetObjectItemCaseSensitive(item, "args");
        const char *phase = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "ph"));
        const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(args, "kind"));
        double start = trace_number(item, "ts", NAN), duration = trace_number(item, "dur", NAN);
        int rank = (int)trace_index(item, "pid", 1e6);
        if (!phase || strcmp(phase, "X") != 0 || !kind || rank < 0 || !(fabs(start) < 1e15) ||
            !(duration >= 0 && duration < 1e15)) continue;
        TraceEvent e = trace_event(kind, rank, (int)trace_index(item, "tid", 1e6),
                                   (int)trace_index(args, "micro", 1e6),
                                   (int)trace_index(args, "chunk", 1e6));
        e.start_us = start;
        e.duration_us = duration;
        double step = trace_number(args, "step", 0);
        e.step = step >= 0 && step < 1e15 ? (long)step : -1;
        trace_add(list, &e);
    }
    cJSON_Delete(root);
    return list->count > 0 || error_set(err, "%s holds no events with a kind", path);
}

#endif
