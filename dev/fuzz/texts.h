// texts.h: fuzz targets for texts that people write: command lines and their values, schedules,
// clusters, tables.
//
// defines: fuzz_options, fuzz_blend, fuzz_ramp, fuzz_schedule, fuzz_cluster, fuzz_simulate,
//          fuzz_rows
#ifndef DEV_FUZZ_TEXTS_H
#define DEV_FUZZ_TEXTS_H

#include "dev/fuzz/files.h"
#include "dev/scale/rows.h"
#include "llmc/grid.h"
#include "llmc/pipeline_lists.h"

// Parses a command line, a word a line. The first byte gives the number of ranks.
static void fuzz_options(const uint8_t *data, size_t size) {
    Error err = {""};
    Options o;
    char *words[64] = {"train_gpt"}, *rest;
    int count = 1;
    if (size < 2) return;
    size_t ranks = 1 + data[0] % 64;
    char *text = strndup((const char *)data + 2, size - 2);
    rest = text;
    for (char *word; count < 63 && (word = strsep(&rest, "\n"));) words[count++] = word;
    RankOptions groups = rank_options((unsigned)data[1] % 8 * OPTIONS_TENSOR);
    bool parsed = options_parse(&o, NULL, count, words, groups, &err);
    o.grid.rank = data[1] % ranks;
    if (parsed && options_resolve(&o, NULL, ranks, &err)) {
        fuzz_promise(o.config.C % o.config.NH == 0 && o.config.Vp >= o.config.V);
        fuzz_promise(o.global_batch % o.micro_batch == 0);
        fuzz_promise(o.grid.t * o.grid.d * o.grid.p == ranks);
    }
    for (const char *c = err.text; *c; c++) fuzz_promise((unsigned char)*c >= ' ');
    free(text);
}

// Reads a blend. The sources must take turns by their weights, and stay as near to their shares
// as dataloader.h promises.
static void fuzz_blend(const uint8_t *data, size_t size) {
    Error err;
    DataLoader dl = {};
    char *text = strndup((const char *)data, size);
    if (blend_read(&dl, text, &err)) {
        int64_t given[BLEND_MOST_SOURCES] = {0}, W = (int64_t)dl.parts,
                n = (int64_t)dl.source_count;
        fuzz_promise(W > 0 && W <= BLEND_MOST_PARTS && n > 0 && n <= BLEND_MOST_SOURCES);
        blend_make(&dl);
        for (int64_t k = 0; k < W && k < 5000; k++) {
            uint64_t number, later;
            const DataSource *source = blend_source(&dl, (uint64_t)k, &number);
            fuzz_promise(source - dl.sources < n &&
                         (int64_t)number == given[source - dl.sources]++);
            fuzz_promise(blend_source(&dl, (uint64_t)(k + 5 * W), &later) == source);
            fuzz_promise(later == number + 5 * source->weight);
            for (int64_t i = 0; i < n && n > 1; i++) {
                int64_t off = given[i] * W - (k + 1) * (int64_t)dl.sources[i].weight;
                fuzz_promise((off < 0 ? -off : off) * (2 * n - 2) <= W * (2 * n - 3));
            }
        }
        for (int64_t i = 0; i < n && W <= 5000; i++)
            fuzz_promise(given[i] == (int64_t)dl.sources[i].weight);
    }
    dataloader_close(&dl);
    free(text);
}

// Reads a ramp. Batches must grow in steps of whole micro-batches, and be the global batch from
// the ramp's last sample on.
static void fuzz_ramp(const uint8_t *data, size_t size) {
    Error err;
    Ramp ramp;
    if (size < 3) return;
    size_t unit = 1 + data[0] % 16, G = unit * (1 + (size_t)data[1] * data[2]), sample = 0,
           before = 0;
    char *text = strndup((const char *)data + 3, size - 3);
    if (ramp_parse(&ramp, text, G, unit, &err)) {
        for (size_t step = 0; step < 100; step++) {
            size_t batch = ramp_batch(&ramp, G, sample);
            fuzz_promise(batch >= before && batch >= ramp.start && batch <= G && batch % unit == 0);
            before = batch;
            sample += batch;
        }
        fuzz_promise(ramp_batch(&ramp, G, ramp.samples) == G);
    }
    free(text);
}

// Reads a schedule. A proved one must have every step once.
static void fuzz_schedule(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    PipelineLists lists;
    int fd = fuzz_file(data, size, path);
    if (pipeline_read(path, &lists, &err)) {
        // The proof takes memory for all possible steps; a program asks for as many as it trains.
        if ((double)lists.p * lists.m * lists.v < 1e5 &&
            pipeline_prove(&lists, PIPELINE_BUFFERS, &err)) {
            for (int s = 0; s < lists.p; s++)
                fuzz_promise(lists.counts[s] >= 2 * (size_t)lists.m * (size_t)lists.v);
        }
    }
    pipeline_lists_free(&lists);
    close(fd);
}

// Makes a layout of 32 ranks.
static StepLayout fuzz_layout(void) {
    StepLayout r;
    memset(&r, 0, sizeof r);
    r.ranks = 32, r.layers = 8, r.C = 256, r.NH = 8, r.T = 128, r.vocabulary = 1024;
    r.global_batch = 32, r.micro_batch = 2, r.t = 4, r.p = 2, r.d = 4, r.v = 2,
    r.schedule = SCHEDULE_INTERLEAVED;
    r.scatter_gather = r.zero = true;
    return r;
}

// Reads a cluster. With any constants a step takes some time, no less than its bound, and its
// parts are numbers.
static void fuzz_cluster(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    Cluster cluster;
    StepTime time;
    int fd = fuzz_file(data, size, path);
    memset(&cluster, 0, sizeof cluster);
    if (cluster_read(&cluster, path, &err)) {
        StepLayout r = fuzz_layout();
        fuzz_promise(step_simulate(&cluster, &r, &time, &err));
        fuzz_promise(isfinite(time.seconds) && time.seconds > 0);
        StepPieces pieces[4] = {};
        StepMemo memo = {pieces, 4};
        fuzz_promise(step_bound(&cluster, &r, &memo) <= time.seconds * (1 + 1e-9));
        for (int i = 0; i < TIME_PARTS; i++) fuzz_promise(isfinite(time.parts[i]));
    }
    close(fd);
}

// Simulates any layout on one of the clusters described here. If step_check accepts it, its time
// is at least its bound and the sum of its parts. A second call must return the same time.
static void fuzz_simulate(const uint8_t *data, size_t size) {
    static const char *const names[] = {"laptop",    "dgx-a100", "selene-2021",
                                        "roce-a100", "eos-2025", "holmes-a100"};
    char path[64];
    Error err;
    Cluster cluster;
    StepTime time, again;
    StepLayout r = fuzz_layout();
    if (size < 16) return;
    snprintf(path, sizeof path, "dev/clusters/%s.json", names[data[0] % 6]);
    if (!cluster_read(&cluster, path, &err)) exit(1);
    r.t = (size_t)1 << data[1] % 4, r.p = 1 + data[2] % 12, r.d = 1 + data[3] % 12,
    r.v = 1 + data[4] % 4;
    r.ranks = r.t * r.p * r.d;
    r.layers = 1 + data[5] % 96, r.NH = r.t * (1 + data[6] % 16),
    r.C = r.NH * 8 * (1 + data[7] % 24);
    r.T = 64 * (1 + (size_t)data[8]), r.micro_batch = 1 + data[9] % 8;
    r.global_batch = r.micro_batch * r.d * (1 + data[10] % 64);
    r.schedule = (Schedule)(data[11] % (SCHEDULE_ZB_AUTO + 1));
    r.recompute = (LayerRecompute)(data[12] % (LAYER_WHOLE + 1)),
    r.max_in_flight = 1 + data[13] % 24;
    r.sequence_parallel = data[14] & 1, r.scatter_gather = data[14] & 2,
    r.short_ends = data[14] & 4;
    r.zero = data[14] & 8, r.shard = data[14] & 16 ? 2 + data[14] / 32 % 2 : 0;
    strcpy(r.order, data[15] % 2 ? "tpd" : "tdp");
    bool sound = step_check(&r, &err), done = step_simulate(&cluster, &r, &time, &err);
    fuzz_promise(sound || !done);
    for (const char *c = err.text; !done && *c; c++) fuzz_promise((unsigned char)*c >= ' ');
    if (!done) return;
    StepPieces pieces[4] = {};
    StepMemo memo = {pieces, 4};
    double sum = 0;
    for (int i = 0; i < TIME_PARTS; i++) sum += time.parts[i];
    fuzz_promise(isfinite(time.seconds) && time.seconds > 0 && fabs(sum / time.seconds - 1) < 1e-6);
    fuzz_promise(step_bound(&cluster, &r, &memo) <= time.seconds * (1 + 1e-9) &&
                 time.slowest < r.p);
    fuzz_promise(step_simulate(&cluster, &r, &again, &err) &&
                 memcmp(&time, &again, sizeof time) == 0);
}

// Reads a table of published runs. A row is refused by its layout or has a time.
static void fuzz_rows(const uint8_t *data, size_t size) {
    char path[40];
    Error err;
    Row *rows = NULL;
    Cluster cluster;
    StepTime time;
    size_t count = 0;
    int fd = fuzz_file(data, size, path);
    if (!cluster_read(&cluster, "dev/clusters/laptop.json", &err)) exit(1);
    if (rows_read(path, &rows, &count, &err)) {
        for (size_t i = 0; i < count; i++) {
            const StepLayout *r = &rows[i].run;
            if (rows[i].bad || !step_check(r, &err)) continue;
            size_t m = r->global_batch / (r->micro_batch * r->d);
            if (r->ranks > 4096 || r->p * r->v * m > 4096) continue;  // sound, but slow
            fuzz_promise(step_simulate(&cluster, r, &time, &err) && isfinite(time.seconds));
        }
    }
    free(rows);
    close(fd);
}

#endif
