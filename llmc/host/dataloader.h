// dataloader.h: training samples by number, from shards in llm.c's format.
//
// A shard is 256 int32 of header (magic 20240520, version 1, number of tokens) and uint16 tokens, all
// little-endian. Its sample n is tokens n*T .. n*T+T: T inputs, and the same shifted by one as T targets. The
// samples of all shards, in the order of their names, are numbered through: that is an epoch. A global sample
// number goes on from epoch to epoch. Which rank reads which number is the trainer's affair: nothing here
// depends on the layout.
//
// defines: DataShard, DataLoader, dataloader_open, dataloader_close, dataloader_check_batch, dataloader_permute,
//          dataloader_read
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <glob.h>

#include "llmc/host/file.h"
#include "llmc/host/rand.h"

enum { SHARD_MAGIC = 20240520, SHARD_VERSION = 1, SHARD_HEADER_BYTES = 1024 };

typedef struct {
    char *path;
    size_t tokens;
    size_t first_sample;  // number within the epoch
    size_t samples;
} DataShard;

typedef struct {
    size_t T;
    size_t samples;     // of one epoch
    size_t count;
    DataShard *shards;  // [count] sorted by name
    int fd;             // the shard that was read last stays open; -1: none
    size_t open_shard;
    uint16_t *buffer;   // [T + 1]
} DataLoader;

static inline void dataloader_close(DataLoader *dl) {
    for (size_t i = 0; i < dl->count; i++) free(dl->shards[i].path);
    free(dl->shards);
    free(dl->buffer);
    if (dl->fd >= 0) close(dl->fd);
    memset(dl, 0, sizeof *dl);
    dl->fd = -1;
}

// Checks the header of one shard and fills in its tokens and samples.
static inline bool shard_check(DataShard *shard, size_t T, Error *err) {
    int32_t header[SHARD_HEADER_BYTES / 4];
    uint64_t bytes;
    size_t got;
    int fd = file_open(shard->path, O_RDONLY, &bytes, err);
    if (fd < 0) return false;
    bool readable = file_read_at(fd, header, sizeof header, 0, &got) ||
                    error_set(err, "cannot read data shard %s: %s", shard->path, strerror(errno));
    close(fd);
    if (!readable) return false;
    if (got < sizeof header) {
        return error_set(err, "data shard %s is truncated: its %zu bytes do not hold the header of %d", shard->path,
                         got, (int)SHARD_HEADER_BYTES);
    }
    if (header[0] != SHARD_MAGIC) {
        return error_set(err, "%s is not a data shard: its magic number is %d, not %d", shard->path,
                         (int)header[0], (int)SHARD_MAGIC);
    }
    if (header[1] != SHARD_VERSION) {
        return error_set(err, "data shard %s has version %d, only version %d is known", shard->path,
                         (int)header[1], (int)SHARD_VERSION);
    }
    long long size = (long long)bytes, expected = SHARD_HEADER_BYTES + 2LL * header[2];
    if (header[2] < 0 || size != expected) {
        return error_set(err, "data shard %s is %s: %d tokens by its header, but %lld bytes instead of %lld",
                         shard->path, size < expected ? "truncated" : "damaged", (int)header[2], size, expected);
    }
    shard->tokens = (size_t)header[2];
    if (shard->tokens < T + 1) {
        return error_set(err, "data shard %s has %zu tokens, fewer than a sample of --seq %zu and its target",
                         shard->path, shard->tokens, T);
    }
    shard->samples = (shard->tokens - 1) / T;
    return true;
}

static inline int shard_compare(const void *a, const void *b) {
    return strcmp(((const DataShard *)a)->path, ((const DataShard *)b)->path);
}

// Opens the shards that the pattern names for sequences of T tokens. Refuses a pattern without files and a
// shard that is truncated, foreign or shorter than one sample. dataloader_close frees it; after an error that
// is done.
static inline bool dataloader_open(DataLoader *dl, const char *pattern, size_t T, Error *err) {
    glob_t found;
    memset(dl, 0, sizeof *dl);
    dl->fd = -1;
    dl->T = T;
    int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status != 0) {
        if (status == GLOB_NOMATCH) return error_set(err, "no data shard matches '%s'", pattern);
        return error_set(err, "cannot list data shards '%s': %s", pattern, strerror(errno));
    }
    dl->count = found.gl_pathc;
    dl->shards = (DataShard *)host_alloc(dl->count, sizeof(DataShard));
    dl->buffer = (uint16_t *)host_alloc(T + 1, sizeof(uint16_t));
    for (size_t i = 0; i < dl->count; i++) dl->shards[i].path = host_string(found.gl_pathv[i]);
    globfree(&found);
    // Not glob's own order: that follows the locale, and ranks of one job may differ in it.
    qsort(dl->shards, dl->count, sizeof(DataShard), shard_compare);
    bool ok = true;
    for (size_t i = 0; ok && i < dl->count; i++) {
        ok = shard_check(&dl->shards[i], T, err);
        dl->shards[i].first_sample = dl->samples;
        dl->samples += dl->shards[i].samples;
    }
    if (!ok) dataloader_close(dl);
    return ok;
}

// Refuses data of which one epoch does not fill a global batch of G sequences.
static inline bool dataloader_check_batch(const DataLoader *dl, size_t G, Error *err) {
    if (dl->samples >= G) return true;
    return error_set(err, "%s%s has %zu samples of --seq %zu, fewer than one --global-batch of %zu",
                     dl->shards[0].path, dl->count > 1 ? " with its sister shards" : "", dl->samples,
                     dl->T, G);
}

// Where a shuffled epoch has its sample `index` < samples: a permutation that needs no memory. A Feistel
// network of eight Philox rounds permutes the next power of 4; a result past the end goes through it again
// (cycle walking).
static inline uint64_t dataloader_permute(uint64_t index, uint64_t samples, uint64_t seed, uint64_t epoch) {
    unsigned half = 1;
    while (half < 32 && (UINT64_C(1) << (2 * half)) < samples) half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t mixed = left ^ (random_words(seed, RANDOM_SHUFFLE, epoch, round, right).word[0] & mask);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= samples);
    return index;
}

// Reads global sample n into inputs [T] and targets [T]; epoch n / samples is permuted if `shuffle`. A token
// that is not below the vocabulary V is an error that names shard and position.
static inline bool dataloader_read(DataLoader *dl, uint64_t n, bool shuffle, uint64_t seed, size_t V,
                                   int *inputs, int *targets, Error *err) {
    uint64_t sample = n % dl->samples, epoch = n / dl->samples;
    if (shuffle) sample = dataloader_permute(sample, dl->samples, seed, epoch);
    size_t low = 0, high = dl->count - 1;  // the last shard that starts at or before the sample
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (dl->shards[middle].first_sample <= sample) low = middle;
        else high = middle - 1;
    }
    const DataShard *shard = &dl->shards[low];
    if (dl->fd < 0 || dl->open_shard != low) {
        uint64_t size;
        if (dl->fd >= 0) close(dl->fd);
        dl->fd = file_open(shard->path, O_RDONLY, &size, err);
        dl->open_shard = low;
        if (dl->fd < 0) return false;
    }
    size_t first = (sample - shard->first_sample) * dl->T, bytes = (dl->T + 1) * sizeof(uint16_t), got;
    errno = 0;
    if (!file_read_at(dl->fd, dl->buffer, bytes, SHARD_HEADER_BYTES + 2 * first, &got) || got < bytes) {
        return error_set(err, "cannot read tokens %zu to %zu of data shard %s: %s", first, first + dl->T, shard->path,
                         errno ? strerror(errno) : "it became shorter");
    }
    for (size_t i = 0; i <= dl->T; i++) {
        if (dl->buffer[i] >= V) {
            return error_set(err, "data shard %s has token %d at position %zu, but the vocabulary is %zu",
                             shard->path, (int)dl->buffer[i], first + i, V);
        }
    }
    for (size_t i = 0; i < dl->T; i++) {
        inputs[i] = dl->buffer[i];
        targets[i] = dl->buffer[i + 1];
    }
    return true;
}

#endif
