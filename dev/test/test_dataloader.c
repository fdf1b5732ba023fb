// test_dataloader.c: llmc/host/dataloader.h: samples, epochs, shuffling, and every kind of shard
// that it refuses.
#define _GNU_SOURCE
#include "dev/test/check.h"
#include "dev/test/make_inputs.h"
#include "llmc/host/dataloader.h"

// Writes a shard of `count` tokens first, first + 1, ... (modulo 60000).
static void counting_shard(const char *path, int first, size_t count) {
    int *tokens = (int *)allocate(count * sizeof(int));
    for (size_t i = 0; i < count; i++) tokens[i] = (first + (int)i) % 60000;
    write_shard(path, SHARD_MAGIC, SHARD_VERSION, (int)count, tokens, count);
    free(tokens);
}

static void test_samples(Check *c) {
    enum { T = 10 };
    DataLoader dl, none;
    Error err = {""};
    int sample[T + 1];
    counting_shard("a_1.bin", 1000, 41);  // 4 samples; the last target is the last token
    counting_shard("a_0.bin", 0, 30);     // 2 samples: token 29 is input of none
    counting_shard("a_2.bin", 5000, 11);  // 1 sample
    if (!check(c, dataloader_open(&dl, "a_*.bin", T, 7, &err),
               "three shards open, for a global batch as large as the epoch %s", err.text)) return;
    check(c, dl.samples == 7 && dl.sources[0].found.gl_pathc == 3, "with 7 samples");
    static const int first[7] = {0, 10, 1000, 1010, 1020, 1030, 5000};  // by name, not by creation
    bool good = true;
    for (uint64_t n = 0; n < 21; n++) {
        good = good && dataloader_read(&dl, n, false, 0, 60000, sample, &err);
        for (int i = 0; i < T; i++)
            good = good && sample[i] == first[n % 7] + i && sample[i + 1] == sample[i] + 1;
    }
    check(c, good,
          "sample n is tokens n*T .. n*T+T of its shard, shard after shard, epoch after epoch");
    check(c, !dataloader_open(&none, "a_*.bin", T, 8, &err),
          "refused: shard shorter than one batch -> %s", err.text);
    check(c, !dataloader_read(&dl, 0, false, 0, 5, sample, &err) && strstr(err.text, "position 5"),
          "refused: token id >= V -> %s", err.text);
    check(c,
          truncate("a_2.bin", 1024 + 20) == 0 &&
              !dataloader_read(&dl, 6, false, 0, 60000, sample, &err),
          "refused: a shard that shrinks under the run -> %s", err.text);
    check(c, unlink("a_0.bin") == 0 && mkfifo("a_0.bin", 0666) == 0 &&
                 !dataloader_read(&dl, 0, false, 0, 60000, sample, &err),
          "refused: one that becomes a FIFO -> %s", err.text);
    dataloader_close(&dl);
    // A file's own name is no pattern, whatever is in it.
    mkdir("run[1]", 0777);
    counting_shard("run[1]/b*\\.bin", 7, 11);
    counting_shard("run[1]/b2\\.bin", 70, 11);
    good = dataloader_open(&dl, "run[1]/b*\\.bin", T, 1, &err) && dl.samples == 1 &&
           dataloader_read(&dl, 0, false, 0, 60000, sample, &err) && sample[0] == 7;
    check(c, good, "a shard whose name has characters of a pattern %s", good ? "" : err.text);
    if (good) dataloader_close(&dl);
}

// One source may have shards of both widths: the shard's own header counts.
static void test_wide(Check *c) {
    enum { T = 10, V = 128256, COUNT = 21 };
    DataLoader dl;
    Error err = {""};
    int tokens[COUNT], sample[T + 1];
    for (int i = 0; i < COUNT; i++) tokens[i] = V - COUNT + i;
    counting_shard("w_0.bin", 0, 11);
    write_shard("w_1.bin", SHARD_MAGIC_32, SHARD_VERSION_32, COUNT, tokens, COUNT);
    if (!check(c, dataloader_open(&dl, "w_*.bin", T, 1, &err), "a shard of uint32 opens %s",
               err.text))
        return;
    bool good = dl.samples == 3 && dataloader_read(&dl, 0, false, 0, V, sample, &err) &&
                sample[10] == 10 && dataloader_read(&dl, 2, false, 0, V, sample, &err);
    for (int i = 0; i < T; i++)
        good = good && sample[i] == tokens[T + i] && sample[i + 1] == tokens[T + i + 1];
    check(c, good, "with its samples, behind a shard of uint16 %s", err.text);
    check(c,
          !dataloader_read(&dl, 2, false, 0, V - 1, sample, &err) &&
              strstr(err.text, "has token 128255 at position 20"),
          "refused: token id >= V -> %s", err.text);
    dataloader_close(&dl);
}

static void test_permutation(Check *c) {
    bool bijective = true, differs = true, seeded = true;
    static unsigned char seen[70000];
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 100, 1023, 1024, 1025, 65537};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        memset(seen, 0, sizeof seen);
        size_t fixed = 0, same_epoch = 0, same_seed = 0;
        for (uint64_t i = 0; i < sizes[s]; i++) {
            uint64_t j = dataloader_permute(i, sizes[s], 42, 0, 0);
            bijective = bijective && j < sizes[s] && !seen[j];
            if (j < sizes[s]) seen[j] = 1;
            fixed += j == i;
            same_epoch += j == dataloader_permute(i, sizes[s], 42, 1, 0);
            same_seed += j == dataloader_permute(i, sizes[s], 43, 0, 0);
        }
        if (sizes[s] < 100) continue;
        // About 1 is expected of random permutations.
        differs = differs && fixed < 12 && same_epoch < 12;
        seeded = seeded && same_seed < 12;
    }
    check(c, bijective, "a shuffled epoch has every sample once");
    check(c, differs, "no two epochs have the same order");
    check(c, seeded, "\"seed + rank\": the order depends on seed and epoch alone");

    // Neighbours must not stay neighbours: the mean distance of two uniform numbers below N is
    // N/3.
    double distance = 0;
    enum { N = 10000 };
    for (uint64_t i = 0; i + 1 < N; i++) {
        distance += fabs((double)dataloader_permute(i, N, 1, 0, 0) -
                         (double)dataloader_permute(i + 1, N, 1, 0, 0));
    }
    check(c, fabs(distance / (N - 1) / N - 1.0 / 3) < 0.02,
          "neighbours are %.3f of the epoch apart", distance / (N - 1) / N);
    bool large = true;
    for (uint64_t i = 0; i < 1000; i++)
        large = large && dataloader_permute(i, UINT64_C(1) << 40, 1, 0, 0) < (UINT64_C(1) << 40);
    check(c, large, "an epoch of 2^40 samples");

    DataLoader dl;
    Error err = {""};
    int sample[5];
    counting_shard("b_0.bin", 0, 4 * 50 + 1);
    counting_shard("b_1.bin", 200, 4 * 33 + 1);
    if (!check(c, dataloader_open(&dl, "b_*.bin", 4, 1, &err), "two shards open %s", err.text))
        return;
    memset(seen, 0, sizeof seen);
    bool once = true;
    for (uint64_t n = 0; n < 83; n++) {
        once = once && dataloader_read(&dl, n, true, 7, 60000, sample, &err) &&
               sample[0] % 4 == 0 && !seen[sample[0] / 4] && sample[3] == sample[0] + 3 &&
               sample[4] == sample[3] + 1;
        if (once) seen[sample[0] / 4] = 1;
    }
    check(c, once, "over several shards too");
    dataloader_close(&dl);
}

// Two sources of one size have orders of their own in each epoch. So a sample meets the sample
// with its number in the other source by chance only, once in an epoch. The first source has
// the same order as alone.
static void test_blend_orders(Check *c) {
    enum { SAMPLES = 500, EPOCHS = 3 };
    DataLoader blend, alone;
    Error err = {""};
    int sample[5], other[5];
    counting_shard("e.bin", 0, 4 * SAMPLES + 1);
    counting_shard("f.bin", 20000, 4 * SAMPLES + 1);
    bool ok = dataloader_open(&blend, "0.5:e.bin,0.5:f.bin", 4, 1, &err) &&
              dataloader_open(&alone, "e.bin", 4, 1, &err);
    if (!check(c, ok, "two sources of one size open %s", err.text)) return;
    int together = 0;
    bool same = true, all = true;
    static char seen[EPOCHS][SAMPLES];
    for (uint64_t n = 0; ok && n < SAMPLES * EPOCHS; n++) {
        int of_e = 0, of_f = 0;
        for (uint64_t k = 2 * n; k < 2 * n + 2; k++) {
            ok = ok && dataloader_read(&blend, k, true, 7, 60000, sample, &err);
            if (sample[0] >= 20000) of_f = (sample[0] - 20000) / 4;
            else of_e = sample[0] / 4;
        }
        ok = ok && dataloader_read(&alone, n, true, 7, 60000, other, &err);
        same = same && other[0] == 4 * of_e;
        all = all && !seen[n / SAMPLES][of_f]++;
        together += of_e == of_f;
    }
    check(c, ok && together < 20,
          "a shuffled blend: %d of %d pairs have the same number in both sources", together,
          SAMPLES * EPOCHS);
    check(
        c, ok && same && all,
        "the first has the order it has alone, and the second each of its samples once an epoch");
    char text[200], of_one[200];
    dataloader_describe(&blend, true, text, sizeof text);
    dataloader_describe(&alone, true, of_one, sizeof of_one);
    check(c,
          strcmp(text, "1 x 500 + 1 x 500, each in an order of its own") == 0 &&
              strcmp(of_one, "1 x 500") == 0,
          "its text says so: %s", text);
    dataloader_describe(&blend, false, text, sizeof text);
    check(c, strcmp(text, "1 x 500 + 1 x 500") == 0, "and without --shuffle it does not: %s", text);
    dataloader_close(&blend);
    dataloader_close(&alone);
}

// The share of every source is right at every k, to within one sample, and the sequence follows
// from k alone.
static void test_blend_shares(Check *c) {
    static const char *const BLENDS[] = {
        "0.7:a,0.3:b", "1:a,1:b", "0.5:a,0.3:b,0.2:c", "0.001:a,0.999:b",
        "0.9:a,0.05:b,0.03:c,0.02:d", "3:a,0:b,4:c",
        "0.17:a,0.13:b,0.11:c,0.19:d,0.07:e,0.23:f,0.1:g",
        "1:a,2:b,3:c,4:d,5:e,6:f,7:g,8:h,9:i,10:j,11:k,12:l", "0.000001:a,0.5:b,0.499999:c",
        "7:a"};
    double worst = 0;
    bool opened = true, numbered = true;
    for (size_t i = 0; i < sizeof BLENDS / sizeof BLENDS[0]; i++) {
        DataLoader dl = {0};
        Error err = {""};
        uint64_t given[16] = {0}, number;
        opened = opened && blend_read(&dl, BLENDS[i], &err);
        if (opened) blend_make(&dl);
        for (uint64_t k = 0; opened && k < 2 * dl.parts + 100; k++) {
            size_t source = (size_t)(blend_source(&dl, k, &number) - dl.sources);
            numbered = numbered && number == given[source]++;
            for (size_t s = 0; s < dl.source_count; s++) {
                double share = (double)(k + 1) * (double)dl.sources[s].weight / (double)dl.parts;
                worst = fmax(worst, fabs((double)given[s] - share));
            }
        }
        dataloader_close(&dl);
    }
    check(c, opened && worst < 1,
          "blends: after k samples a source has given its share, but for %.3f < 1", worst);
    check(c, numbered, "each source gives its samples in order, none twice and none left out");
}

static void test_blend_samples(Check *c) {
    DataLoader dl;
    Error err = {""};
    int sample[5];
    counting_shard("c_0.bin", 0, 4 * 5 + 1);       // 5 samples
    counting_shard("c_1.bin", 1000, 4 * 2 + 1);    // 2 more of the same source
    counting_shard("d_0.bin", 20000, 4 * 3 + 1);   // 3 samples
    if (!check(c, dataloader_open(&dl, "0.75:c_*.bin,0.25:d_*.bin", 4, 1, &err),
               "a blend opens %s", err.text))
        return;
    check(c, dl.samples == 10 && dl.source_count == 2 && dl.sources[0].found.gl_pathc == 2 &&
                 dl.sources[1].found.gl_pathc == 1,
          "of two sources with 10 samples together");
    bool same = true, right = true, shuffled = false;
    int order[40];
    uint64_t from_c = 0, from_d = 0;
    for (uint64_t n = 0; n < 40; n++) {
        right = right && dataloader_read(&dl, n, false, 0, 60000, sample, &err);
        bool d = sample[0] >= 20000;
        uint64_t number = d ? from_d++ : from_c++, place = number % (d ? 3 : 7);
        int want = d           ? 20000 + 4 * (int)place
                   : place < 5 ? 4 * (int)place
                               : 1000 + 4 * (int)(place - 5);
        right = right && sample[0] == want && sample[4] == want + 4;
        order[n] = sample[0];
    }
    check(c, right && from_c == 30 && from_d == 10,
          "3 of 4 samples come from the one that weighs 0.75");
    for (uint64_t n = 40; n-- > 0;) {
        same = same && dataloader_read(&dl, n, false, 0, 60000, sample, &err) &&
               sample[0] == order[n];
    }
    check(c, same,
          "read in any order, as a resume or another data rank does, sample n is the same");
    unsigned seen = 0;
    uint64_t from_d_too = 0;
    for (uint64_t n = 0; n < 40; n++) {
        right = right && dataloader_read(&dl, n, true, 3, 60000, sample, &err);
        shuffled |= sample[0] != order[n];
        if (sample[0] < 20000 || from_d_too++ >= 3) continue;
        seen |= 1u << (sample[0] - 20000) / 4;
    }
    check(c, right && shuffled && seen == 7,
          "shuffled, an epoch of a source has each of its samples once");
    dataloader_close(&dl);

    static const struct { const char *text, *expected; } BAD[] = {
        {"0:c_*.bin,0.0:d_*.bin", "add up to 0"},
        {"0.7:c_*.bin,d_*.bin", "'d_*.bin' is no WEIGHT:GLOB"},
        {"0.7:c_*.bin,0.3:", "'0.3:' is no WEIGHT:GLOB"},
        {"0.7:c_*.bin,", "'' is no WEIGHT:GLOB"},
        {"0.7:c_*.bin,-0.3:d_*.bin", "the weight '-0.3'"},
        {"0.7:c_*.bin,nan:d_*.bin", "the weight 'nan'"},
        {"1:c_*.bin,0.7.1:d_*.bin", "'0.7.1:d_*.bin' is no WEIGHT:GLOB"},
        {"1:c_*.bin,.:d_*.bin", "'.:d_*.bin' is no WEIGHT:GLOB"},
        {"99999999999999999999:c_*.bin,1:d_*.bin", "to a million"},
        {"0.123456789:c_*.bin,1:d_*.bin", "give them fewer digits"},
        {"0.7:c_*.bin,0.3:nothing_*.bin", "no data shard matches 'nothing_*.bin'"},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        bool refused = !dataloader_open(&dl, BAD[i].text, 4, 1, &err);
        check(c, refused && strstr(err.text, BAD[i].expected), "refused: %s -> %s", BAD[i].text,
              err.text);
        if (!refused) dataloader_close(&dl);
    }
}

typedef struct {
    const char *what, *expected;
    int magic, version, stated;  // stated: tokens by the header
    size_t tokens;
} BadShard;

static const BadShard BAD_SHARDS[] = {
    {"foreign magic", "not a data shard", 0x4d4d, SHARD_VERSION, 100, 100},
    {"another version", "version 2", SHARD_MAGIC, 2, 100, 100},
    {"one's version with the other's magic", "20240801 and version 1", SHARD_MAGIC_32,
     SHARD_VERSION, 100, 100},
    {"uint32 cut", "is truncated or damaged", SHARD_MAGIC_32, SHARD_VERSION_32, 100, 99},
    {"truncated", "is truncated or damaged", SHARD_MAGIC, SHARD_VERSION, 100, 99},
    {"longer than its header says", "is truncated or damaged", SHARD_MAGIC, SHARD_VERSION, 100,
     101},
    {"negative count", "is truncated or damaged", SHARD_MAGIC, SHARD_VERSION, -1, 100},
    {"absurd count", "is truncated or damaged", SHARD_MAGIC, SHARD_VERSION, 0x7fffffff, 100},
    {"shorter than one sample", "fewer than a sample", SHARD_MAGIC, SHARD_VERSION, 10, 10},
    {"empty", "fewer than a sample", SHARD_MAGIC, SHARD_VERSION, 0, 0},
};

static void test_refusals(Check *c) {
    DataLoader dl;
    Error err = {""};
    static int tokens[256];
    counting_shard("bad_0.bin", 0, 100);  // sound: one bad shard among good ones is enough
    for (size_t i = 0; i < sizeof BAD_SHARDS / sizeof BAD_SHARDS[0]; i++) {
        const BadShard *bad = &BAD_SHARDS[i];
        write_shard("bad_1.bin", bad->magic, bad->version, bad->stated, tokens, bad->tokens);
        bool refused = !dataloader_open(&dl, "bad_*.bin", 10, 1, &err);
        check(c, refused && strstr(err.text, bad->expected) && strstr(err.text, "bad_1.bin"),
              "refused: %s -> %s", bad->what, err.text);
        if (!refused) dataloader_close(&dl);
    }
    write_file("bad_1.bin", "short", 5);
    check(c, !dataloader_open(&dl, "bad_*.bin", 10, 1, &err), "refused: no whole header -> %s",
          err.text);
    check(c, !dataloader_open(&dl, "nothing_*.bin", 10, 1, &err), "refused: missing -> %s",
          err.text);
    check(c, !dataloader_open(&dl, ".", 10, 1, &err), "refused: a folder -> %s", err.text);
    bool made = unlink("bad_1.bin") == 0 && mkfifo("bad_1.bin", 0666) == 0;
    check(c,
          made && !dataloader_open(&dl, "bad_*.bin", 10, 1, &err) &&
              strstr(err.text, "bad_1.bin: not a regular file"),
          "refused: a FIFO, at once -> %s", err.text);
}

int main(void) {
    static Check c;
    static char folder[] = "build/test_dataloader.XXXXXX";
    alarm(60);  // ends the program if a shard that is a FIFO makes it wait
    if (!mkdtemp(folder) || chdir(folder)) die("cannot make", folder);
    test_samples(&c);
    test_wide(&c);
    test_permutation(&c);
    test_blend_shares(&c);
    test_blend_samples(&c);
    test_blend_orders(&c);
    test_refusals(&c);
    if (chdir("../..") == 0) remove_tree(folder);
    return check_summary(&c);
}
