// test_rand.c: llmc/host/rand.h: known answers, statistics, and that a number depends on its
// place alone.
#include "dev/test/check.h"
#include "llmc/masks.h"
#include "llmc/host/rand.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t counter[4], key[2], answer[4];
} KnownAnswer;

// The known answers that the authors of the generator publish for philox4x32 with 10 rounds.
static const KnownAnswer KNOWN_ANSWERS[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static void test_known_answers(Check *c) {
    for (size_t i = 0; i < sizeof KNOWN_ANSWERS / sizeof KNOWN_ANSWERS[0]; i++) {
        const KnownAnswer *k = &KNOWN_ANSWERS[i];
        Philox counter;
        memcpy(counter.word, k->counter, sizeof counter.word);
        Philox out = philox4x32_10(counter, k->key[0], k->key[1]);
        check(c, memcmp(out.word, k->answer, sizeof out.word) == 0,
              "philox4x32-10 known answer %zu", i);
    }
}

static bool same(Philox a, Philox b) { return memcmp(&a, &b, sizeof a) == 0; }

static void test_places(Check *c) {
    Philox base = random_words(1, RANDOM_INIT, 2, 3, 4);
    check(c, same(base, random_words(1, RANDOM_INIT, 2, 3, 4)),
          "the same place gives the same words");
    check(c, !same(base, random_words(2, RANDOM_INIT, 2, 3, 4)), "the low half of the seed counts");
    check(c, !same(base, random_words(1 + (UINT64_C(1) << 32), RANDOM_INIT, 2, 3, 4)),
          "the high half of the seed counts");
    check(c, !same(base, random_words(1, RANDOM_SAMPLE, 2, 3, 4)), "the purpose counts");
    check(c, !same(base, random_words(1, RANDOM_INIT, 5, 3, 4)), "the step counts");
    check(c, !same(base, random_words(1, RANDOM_INIT, 2, 5, 4)), "the tensor counts");
    check(c, !same(base, random_words(1, RANDOM_INIT, 2, 3, 4 + (UINT64_C(1) << 40))),
          "an element past 2^32 counts");
}

// Moments of n numbers against those of the distribution, within five standard errors of the
// estimate.
static void test_statistics(Check *c) {
    enum { N = 200000 };
    double sum = 0, squares = 0, cubes = 0, fourths = 0, uniform = 0, lowest = 1, highest = 0;
    static float normals[N];
    random_normal_fill(normals, 7, 0, 0, N, 1.0);
    for (size_t i = 0; i < N; i++) {
        double x = normals[i], u = random_uniform(7, RANDOM_SAMPLE, 1, 0, i);
        sum += x;
        squares += x * x;
        cubes += x * x * x;
        fourths += x * x * x * x;
        uniform += u;
        if (u < lowest) lowest = u;
        if (u > highest) highest = u;
    }
    double error = 5.0 / sqrt((double)N);
    check(c, fabs(sum / N) < error, "normal: mean %.5f", sum / N);
    check(c, fabs(squares / N - 1) < error * sqrt(2.0), "normal: variance %.5f", squares / N);
    check(c, fabs(cubes / N) < error * sqrt(15.0), "normal: third moment %.5f", cubes / N);
    check(c, fabs(fourths / N - 3) < error * sqrt(96.0), "normal: fourth moment %.5f", fourths / N);
    check(c, fabs(uniform / N - 0.5) < error * sqrt(1.0 / 12), "uniform: mean %.5f", uniform / N);
    check(c, lowest >= 0 && lowest < 1e-4 && highest < 1 && highest > 1 - 1e-4,
          "uniform: range [%.6f, %.6f]", lowest, highest);
}

// A shard of a tensor has the numbers of the whole tensor at its place, whatever its first
// element and length are.
static void test_fill(Check *c) {
    enum { N = 70001 };  // enough for several threads
    float *whole = (float *)malloc(N * sizeof(float)), *part = (float *)malloc(N * sizeof(float));
    if (!whole || !part) exit(1);
    random_normal_fill(whole, 1337, 9, 0, N, 0.02);
    bool single = true;
    for (size_t i = 0; i < N; i++) {
        random_normal_fill(part, 1337, 9, i, 1, 0.02);
        single = single && whole[i] == part[0];
    }
    check(c, single, "a fill has the numbers of its elements");
    bool equal = true, inside = true;
    for (size_t first = 0; first < 9; first++) {
        for (size_t count = 0; count < 12; count++) {
            for (size_t i = 0; i < 16; i++) part[i] = 77.0f;
            random_normal_fill(part + 1, 1337, 9, first, count, 0.02);
            equal = equal && memcmp(part + 1, whole + first, count * sizeof(float)) == 0;
            inside = inside && part[0] == 77.0f && part[1 + count] == 77.0f;
        }
    }
    check(c, equal, "any shard of a tensor has the bits of the whole");
    check(c, inside, "a fill writes its elements only");
    free(whole);
    free(part);
}

// Returns true if element i of a sample is dropped.
static bool dropped(Dropout d, uint64_t sample, uint64_t i) {
    Philox block = dropout_block(&d, sample, i / DROPOUT_BLOCK);
    return dropout_factor(&d, &block, (unsigned)(i % DROPOUT_BLOCK)) == 0.0f;
}

// Dropout's masks: the right share is dropped and the mean stays. Masks of other seeds, steps,
// layers, purposes and samples are independent, and so are neighbours in a mask.
static void test_dropout(Check *c) {
    enum { N = 200000, OTHERS = 6 };
    Dropout d = dropout_for(dropout_make(0.1, 1337, 5, 32), DROPOUT_FCPROJ, 3);
    Dropout others[OTHERS] = {d, d, d, d, d, d};
    others[0].seed++, others[1].step++, others[2].layer++, others[3].sample++;
    others[4].purpose = DROPOUT_PROJ;  // and the last: the neighbour
    size_t count = 0, both[OTHERS] = {0};
    for (size_t i = 0; i < N; i++) {
        bool drop = dropped(d, 0, i);
        count += drop;
        for (size_t k = 0; k < OTHERS; k++)
            both[k] += drop && dropped(others[k], 0, k == OTHERS - 1 ? i + 1 : i);
    }
    double share = (double)count / N, p = d.threshold / 65536.0, error = 5.0 / sqrt(N);
    check(c, fabs(share - p) < error * sqrt(p * (1 - p)) && fabs(p - 0.1) < 1e-5,
          "dropout 0.1 drops %.5f", share);
    check(c, fabs((double)d.scale * (1 - p) - 1) < 1e-7,
          "and what stays is scaled so that the mean stays");
    bool independent = true;
    for (size_t k = 0; k < OTHERS; k++)
        independent = independent && fabs((double)both[k] / N - p * p) < error * p;
    check(c, independent, "masks of another seed, step, layer, sample or place are independent");
    check(c, dropped(d, 1, 77) == dropped(others[3], 0, 77),
          "sample 1 from sample 32 is sample 0 from 33");
    Dropout off = dropout_make(0, 1, 2, 3);
    check(c, off.threshold == 0 && off.scale == 1.0f, "--dropout 0 drops nothing");
}

int main(void) {
    static Check c;
    test_dropout(&c);
    test_known_answers(&c);
    test_places(&c);
    test_statistics(&c);
    test_fill(&c);
    return check_summary(&c);
}
