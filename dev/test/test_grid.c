// test_grid.c: rank coordinates, groups and the split of layers, over every small grid; two rules
// that derive the split of tensors.
#define _GNU_SOURCE
#include "llmc/llama.h"
#include "llmc/pipeline_lists.h"

#include "dev/test/check.h"

static const char *const ORDERS[] = {"tdp", "tpd", "dtp", "dpt", "ptd", "pdt"};

static Grid at(size_t world, size_t rank, size_t t, size_t d, size_t p, const char *order) {
    Grid g = {0, 0, t, d, p, 0, 0, 0, ""};
    Error err;
    if (!grid_make(&g, world, rank, order, &err)) fprintf(stderr, "unexpected: %s\n", err.text);
    return g;
}

// Returns true if two rules give the split of every tensor in a table. Within a layer,
// products alternate: one is cut by its outputs, the next by its inputs. A vector that is
// added to cut outputs is cut with them. Outside the layers a matrix with a row for each
// token of the vocabulary is cut by these rows. outputs_first: matrices are [out, in].
static bool rules_derive_splits(const ModelSpec *spec, bool outputs_first) {
    size_t product = 0;
    bool cut = false;  // the outputs of the last product
    for (size_t i = 0; i < spec->count; i++) {
        const TensorSpec *x = &spec->tensors[i];
        bool layer = i >= spec->layer && i < spec->behind, matrix = x->rows != '1';
        if (layer && matrix && !(x->flags & TENSOR_JOINED)) cut = product++ % 2 == 0;
        Split split = !layer && matrix && x->rows == 'V' ? SPLIT_VOCAB : SPLIT_NONE;
        if (layer && matrix) split = cut == outputs_first ? SPLIT_ROWS : SPLIT_COLUMNS;
        if (layer && !matrix && cut && !(x->flags & TENSOR_NORM)) split = SPLIT_COLUMNS;
        if (x->split != split && !(x->split == SPLIT_QKV && split == SPLIT_COLUMNS)) return false;
    }
    return product == 4;
}

// Every rank has its own coordinates, and grid_rank_at is the inverse.
static bool coordinates_are_a_bijection(size_t t, size_t d, size_t p, const char *order) {
    size_t world = t * d * p;
    for (size_t rank = 0; rank < world; rank++) {
        Grid g = at(world, rank, t, d, p, order);
        if (g.t_rank >= t || g.d_rank >= d || g.p_rank >= p) return false;
        if (grid_rank_at(&g, g.t_rank, g.d_rank, g.p_rank) != (int)rank) return false;
    }
    return true;
}

// A group has as many ranks as its axis is long, each once and in ascending order of its
// coordinate. They differ in the group's own coordinates only, and all of them have the same
// group.
static bool groups_are_right(size_t t, size_t d, size_t p, const char *order, char group) {
    size_t world = t * d * p, size = group == 't'             ? t
                                     : group == 'd'           ? d
                                     : group == 'p' || p == 1 ? p
                                                              : 2;
    for (size_t rank = 0; rank < world; rank++) {
        Grid g = at(world, rank, t, d, p, order);
        int ranks[64], theirs[64];
        size_t count = grid_group(&g, group, ranks), found = 0, before = 0;
        if (count == 0 && (group != 'e' || g.p_rank == 0 || g.p_rank == p - 1)) return false;
        if (count == 0) continue;
        if (count != size) return false;
        for (size_t i = 0; i < count; i++) {
            Grid h = at(world, (size_t)ranks[i], t, d, p, order);
            size_t key = group == 't' ? h.t_rank : group == 'd' ? h.d_rank : h.p_rank;
            found += (size_t)ranks[i] == rank;
            if (i > 0 && key <= before) return false;
            before = key;
            if (grid_group(&h, group, theirs) != count) return false;
            if (memcmp(ranks, theirs, count * sizeof *ranks) != 0) return false;
            if (h.t_rank != g.t_rank && group != 't') return false;
            if (h.d_rank != g.d_rank && group != 'd') return false;
            if (h.p_rank != g.p_rank && group != 'p' && group != 'e') return false;
        }
        if (found != 1) return false;
    }
    return true;
}

// "dropped layers": every layer is in exactly one chunk, and sizes differ by one at most, the
// longer ones first.
static bool layers_are_dealt(size_t L, size_t chunks) {
    size_t next = 0;
    for (size_t c = 0; c < chunks; c++) {
        next += stage_layer_count(L, chunks, c);
        if (c > 0 && stage_layer_count(L, chunks, c) > stage_layer_count(L, chunks, c - 1))
            return false;
    }
    return next == L &&
           stage_layer_count(L, chunks, 0) <= stage_layer_count(L, chunks, chunks - 1) + 1;
}

// Lists of all pairs of stages, dealt to 1 to 3 chunks: a stage has its number of layers, no
// chunk has none.
static bool lists_are_dealt(size_t L) {
    char list[40];
    for (size_t first = 0; first <= L; first++) {
        snprintf(list, sizeof list, "%zu,%zu", first, L - first);
        for (size_t v = 1; v <= 3; v++) {
            size_t sums[2] = {0, 0}, least = L;
            bool sound = first >= v && L - first >= v;
            if (stage_list_is(list, L, 2, v) != sound) return false;
            for (size_t c = 0; c < 2 * v; c++) {
                size_t n = chunk_layers(L, list, 2, v, c);
                sums[c % 2] += n;
                if (n < least) least = n;
            }
            if (sums[0] != first || sums[1] != L - first || (sound && least == 0)) return false;
        }
    }
    return true;
}

static bool refused(size_t world, size_t t, size_t d, size_t p, const char *order,
                    const char *word) {
    Grid g = {0, 0, t, d, p, 0, 0, 0, ""};
    Error err = {""};
    if (grid_make(&g, world, 0, order, &err)) return false;
    return strstr(err.text, word) && !strchr(err.text, '\n');
}

int main(void) {
    static Check c;
    bool bijection = true, groups = true;
    for (size_t t = 1; t <= 4; t++) {
        for (size_t d = 1; d <= 4; d++) {
            for (size_t p = 1; p <= 4; p++) {
                for (size_t o = 0; o < sizeof ORDERS / sizeof *ORDERS; o++) {
                    bijection = bijection && coordinates_are_a_bijection(t, d, p, ORDERS[o]);
                    for (const char *group = "tdpe"; *group && t * d * p <= 36; group++) {
                        groups = groups && groups_are_right(t, d, p, ORDERS[o], *group);
                    }
                }
            }
        }
    }
    check(&c, bijection, "every rank has coordinates of its own, in all six orders");
    check(&c, groups, "tensor, data, pipeline and embedding groups: members, sizes, keys");

    Grid g = at(8, 5, 2, 2, 2, "tdp");
    check(&c, g.t_rank == 1 && g.d_rank == 0 && g.p_rank == 1,
          "rank 5 of 2 x 2 x 2 is tensor 1, data 0, pipeline 1");

    bool dealt = true;
    for (size_t L = 1; L <= 100; L++) {
        for (size_t chunks = 1; chunks <= 100; chunks++)
            dealt = dealt && layers_are_dealt(L, chunks);
    }
    check(
        &c, dealt,
        "dropped layers: every split of 1..100 layers over 1..100 chunks holds each layer once");
    check(&c, stage_layer_count(30, 4, 0) == 8 && stage_layer_count(30, 4, 3) == 7,
          "dropped layers: 30 over 4 is 8 8 7 7");

    for (size_t L = 1; L <= 40; L++) dealt = dealt && lists_are_dealt(L);
    check(&c, dealt,
          "dropped layers: every list of 2 stages gives each its layers, in up to 3 chunks");
    static const char *const bad[] = {"",
                                      ",",
                                      "10",
                                      "5,5,",
                                      ",5,5",
                                      "5,,5",
                                      "5,5,5",
                                      "5,-5",
                                      "5 ,5",
                                      "6,5",
                                      "5,4",
                                      "x,5",
                                      "18446744073709551615,11",
                                      "0,10",
                                      "10,0"};
    bool none = true;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        none = none && !stage_list_is(bad[i], 10, 2, 1);
    check(&c, none && stage_list_is("5,5", 10, 2, 1) && stage_list_is("10", 10, 1, 1),
          "lists that are none");

    check(&c,
          refused(8, 2, 3, 2, "tdp",
                  "--tensor 2 * --pipeline 2 * --data 3 makes 12, but the job has 8 ranks"),
          "2 x 3 x 2 on 8 ranks is refused");
    check(&c, refused(1, 2, 1, 1, "tdp", "--tensor 2 makes 2, but the job has 1 rank"),
          "2 on 1 rank is refused");
    check(&c, refused(1, 1, 1, 1, "tdpx", "--order must be"),
          "an order of four letters is refused");
    check(&c, refused(8, 1000000, 1000000, 1000000, "tdp", "makes 1000000000000000000"),
          "the largest sizes do not overflow");
    check(&c,
          refused(8, 8, 1, 1, "tdd",
                  "--order must be an order of the letters t, d and p, not 'tdd'"),
          "an order that is no permutation is refused");

    bool derived = true;
    for (int i = 0; i < 2 * LLAMA_TYPE_COUNT; i++) {
        Llama m;
        memset(&m, 0, sizeof m);
        m.type = (LlamaType)(i / 2), m.tied = i % 2;
        llama_make(&m);
        derived = derived && m.spec.count > 0 && rules_derive_splits(&m.spec, true);
    }
    check(&c, rules_derive_splits(&GPT2, false), "two rules derive the split of GPT-2's tensors");
    check(&c, derived, "and of those of Llama, Qwen2 and 3, Mistral and Nemotron-4");

    FILE *file = tmpfile();
    char text[1024] = "";
    if (file) {
        g = at(8, 0, 2, 2, 2, "tdp");
        grid_print(file, &g);
        rewind(file);
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    check(&c, strstr(text, "    1     0     4    5\n") != NULL,
          "the printed table names the ranks of each stage");
    return check_summary(&c);
}
