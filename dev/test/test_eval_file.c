// test_eval_file.c: llmc/host/eval_file.h: the layout, and every kind of file that it refuses.
#define _GNU_SOURCE
#include "dev/test/check.h"
#include "dev/test/make_inputs.h"
#include "llmc/host/eval_file.h"

enum { V = 61, T = 8, WORDS = 64 };

// Writes a file: eight int32 of header, and `count` words of 2 bytes in version 1, of 4 in
// version 2.
static void write_eval(const char *path, const int *head, const int *words, size_t count) {
    static unsigned char bytes[EVAL_HEADER_BYTES + 4 * WORDS];
    size_t width = head[1] == 2 ? 4 : 2;
    memset(bytes, 0, sizeof bytes);
    for (size_t i = 0; i < 8; i++) {
        int32_t number = (int32_t)head[i];
        memcpy(bytes + 4 * i, &number, 4);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < width; k++) {
            bytes[EVAL_HEADER_BYTES + width * i + k] = (unsigned char)(words[i] >> 8 * k);
        }
    }
    write_file(path, bytes, EVAL_HEADER_BYTES + width * count);
}

static const int ROWS_HEAD[8] = {EVAL_MAGIC, 1, 2, EVAL_CLOZE, V, 5};
static const int ROWS[] = {4, 2, 2, 10, 11, 12, 13, 3, 1, 1, 20, 21, 22};
static const int CHOICES_HEAD[8] = {EVAL_MAGIC, 1, 4, EVAL_CHOICES, V};
static const int CHOICES[] = {5, 3, 2, 1, 1, 2, 3, 5, 6,  4, 3, 1, 0, 1, 2, 3, 4,
                              3, 2, 1, 1, 7, 8, 9,        5, 2, 3, 0, 7, 8, 1, 2, 3};
enum {
    ROWS_COUNT = sizeof ROWS / sizeof ROWS[0],
    CHOICES_COUNT = sizeof CHOICES / sizeof CHOICES[0]
};

static bool row_is(const EvalFile *e, size_t i, size_t tokens, size_t first, size_t count,
                   int last) {
    const EvalRow *row = &e->row[i];
    return row->tokens == tokens && row->first == first && row->count == count &&
           (int)eval_word_at(e, row->at + tokens - 1) == last;
}

static void test_layouts(Check *c) {
    EvalFile e;
    Error err = {""};
    write_eval("rows.bin", ROWS_HEAD, ROWS, ROWS_COUNT);
    if (!check(c, eval_open(&e, "rows.bin", V, T, &err), "rows are read %s", err.text)) return;
    check(c, e.kind == EVAL_CLOZE && e.rows == 2 && e.words == 5 && row_is(&e, 0, 4, 2, 2, 13) &&
                 row_is(&e, 1, 3, 1, 1, 22), "rows, masks and words");
    eval_close(&e);
    write_eval("choices.bin", CHOICES_HEAD, CHOICES, CHOICES_COUNT);
    if (!check(c, eval_open(&e, "choices.bin", V, T, &err), "choices are read %s", err.text))
        return;
    check(c,
          e.kind == EVAL_CHOICES && e.rows == 4 && row_is(&e, 0, 5, 3, 2, 6) &&
              row_is(&e, 1, 4, 3, 1, 4) && row_is(&e, 2, 3, 2, 1, 9) &&
              row_is(&e, 3, 5, 2, 3, 3) && e.row[0].right && !e.row[1].right && e.row[2].right &&
              !e.row[3].right,
          "each ending stands behind its context, the right one first");
    eval_close(&e);
}

// Vocabularies above 65536 have words of four bytes.
static void test_wide(Check *c) {
    enum { LARGE = 128256 };
    static const int rows_head[8] = {EVAL_MAGIC, 2, 1, EVAL_TEXT, LARGE},
                     rows[] = {3, 1, 2, 5, 65536, LARGE - 1};
    static const int choices_head[8] = {EVAL_MAGIC, 2, 2, EVAL_CHOICES, LARGE};
    static const int choices[] = {2, 1, 1, 1, 100000, 128000, 2, 1, 1, 0, 100000, 128001};
    EvalFile e;
    Error err = {""};
    write_eval("wide.bin", rows_head, rows, 6);
    if (!check(c, eval_open(&e, "wide.bin", LARGE, T, &err), "words of 4 bytes are read %s",
               err.text))
        return;
    bool ok = row_is(&e, 0, 3, 1, 2, LARGE - 1) && eval_word_at(&e, e.row[0].at + 1) == 65536;
    check(c, ok, "with tokens above 65535");
    eval_close(&e);
    write_eval("bad.bin", rows_head, rows, 5);
    check(c, !eval_open(&e, "bad.bin", LARGE, T, &err) && strstr(err.text, "truncated in row 0"),
          "refused: one word less -> %s", err.text);
    write_eval("bad.bin", (const int[8]){EVAL_MAGIC, 2, 1, EVAL_TEXT, LARGE - 1}, rows, 6);
    check(c,
          !eval_open(&e, "bad.bin", LARGE - 1, T, &err) &&
              strstr(err.text, "has token 128255 in row 0"),
          "refused: a token >= V -> %s", err.text);
    write_eval("wide.bin", choices_head, choices, 12);
    if (!check(c, eval_open(&e, "wide.bin", LARGE, T, &err), "and choices with them %s",
               err.text))
        return;
    check(c, e.rows == 2 && row_is(&e, 0, 2, 1, 1, 128000) && row_is(&e, 1, 2, 1, 1, 128001),
          "two endings");
    eval_close(&e);
}

// A tokenizer with one token more than the model, such as a [PAD], which no row has: the rows stay
// as they are without.
static void test_larger(Check *c) {
    static const int head[8] = {EVAL_MAGIC, 1, 2, EVAL_CLOZE, V + 1, 5};
    EvalFile e;
    Error err = {""};
    int words[WORDS];
    write_eval("larger.bin", head, ROWS, ROWS_COUNT);
    if (!check(c, eval_open(&e, "larger.bin", V, T, &err), "a larger vocabulary is read %s",
               err.text))
        return;
    check(c, e.rows == 2 && row_is(&e, 0, 4, 2, 2, 13) && row_is(&e, 1, 3, 1, 1, 22),
          "with the same rows");
    eval_close(&e);
    memcpy(words, ROWS, sizeof ROWS);
    words[ROWS_COUNT - 1] = V;
    write_eval("larger.bin", head, words, ROWS_COUNT);
    check(c,
          !eval_open(&e, "larger.bin", V, T, &err) &&
              strstr(err.text, "larger.bin has token 61 in row 1"),
          "refused: a token of it that the model lacks -> %s", err.text);
}

typedef struct {
    const char *what, *expected;
    bool choices;
    int head, to_head;  // header[head] becomes to_head; -1: none
    int word, to_word;  // the same of the words behind it
} BadEval;

static const BadEval BAD[] = {
    {"foreign magic", "is no evaluation file", false, 0, 20240520, -1, 0},
    {"another version", "and version 3, not", false, 1, 3, -1, 0},
    {"no rows", "says that it has 0 rows", false, 2, 0, -1, 0},
    {"more rows than bytes", "says that it has 99 rows", false, 2, 99, -1, 0},
    {"more rows than there are", "is truncated in row 2", false, 2, 3, -1, 0},
    {"fewer rows than there are", "12 bytes behind its last row", false, 2, 1, -1, 0},
    {"unknown kind", "2 rows of kind 4", false, 3, 4, -1, 0},
    {"a smaller vocabulary", "a vocabulary of 60, and the model's is 61", false, 4, 60, -1, 0},
    {"a negative vocabulary", "a vocabulary of -1, and the model's is 61", false, 4, -1, -1, 0},
    {"a mask longer than the row", "counts 3 tokens from 2 on of row 0, which has 4", false, -1,
     0, 2, 3},
    {"a mask behind the row", "counts 2 tokens from 5 on of row 0, which has 4", false, -1, 0, 1,
     5},
    {"nothing counts", "counts 0 tokens", false, -1, 0, 2, 0},
    {"the first token counts", "counts 2 tokens from 0 on of row 0", false, -1, 0, 1, 0},
    {"token id >= V", "has token 61 in row 0", false, -1, 0, 4, 61},
    {"a row longer than the model takes", "is truncated in row 0", false, -1, 0, 0, 60},
    {"a mark that is none", "row 2 has the mark 2: 1 is the right ending", true, -1, 0, 20, 2},
    {"an example without a right ending", "row 0 has the mark 0: 1 is the right ending", true, -1,
     0, 3, 0},
    {"token id >= V in an ending", "has token 99", true, -1, 0, 16, 99},
    {"an ending behind the end", "is truncated", true, -1, 0, 24, 30},
    {"a context without an ending's tokens", "counts 0 tokens", true, -1, 0, 11, 0},
};

static void test_refusals(Check *c) {
    EvalFile e;
    Error err = {""};
    int head[8], words[WORDS];
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        const BadEval *bad = &BAD[i];
        size_t count = bad->choices ? CHOICES_COUNT : ROWS_COUNT;
        memcpy(head, bad->choices ? CHOICES_HEAD : ROWS_HEAD, sizeof head);
        memcpy(words, bad->choices ? CHOICES : ROWS, count * sizeof words[0]);
        if (bad->head >= 0) head[bad->head] = bad->to_head;
        if (bad->word >= 0) words[bad->word] = bad->to_word;
        write_eval("bad.bin", head, words, count);
        bool refused = !eval_open(&e, "bad.bin", V, T, &err);
        check(c, refused && strstr(err.text, bad->expected) && strstr(err.text, "bad.bin"),
              "refused: %s -> %s", bad->what, err.text);
        if (!refused) eval_close(&e);
    }
    check(c, !eval_open(&e, "choices.bin", V, 3, &err) && strstr(err.text, "--seq 3 takes 4"),
          "refused: a row longer than --seq -> %s", err.text);
    check(c, !eval_open(&e, "nothing.bin", V, T, &err), "refused: missing -> %s", err.text);
    check(c, !eval_open(&e, ".", V, T, &err), "refused: a folder -> %s", err.text);
}

// Tests that a file that is cut anywhere is refused. A file with any word changed is read or
// refused, and nothing else happens.
static void test_damage(Check *c) {
    EvalFile e;
    Error err;
    size_t bytes = 0;
    bool refused = true;
    for (int choices = 0; choices < 2; choices++) {
        const char *path = choices ? "choices.bin" : "rows.bin";
        char *data = file_read(path, 1 << 20, &bytes, &err);
        for (size_t n = 0; n < bytes && data; n++) {
            write_file("bad.bin", data, n);
            refused = !eval_open(&e, "bad.bin", V, T, &err) && refused;
        }
        free(data);
        size_t count = choices ? CHOICES_COUNT : ROWS_COUNT;
        int words[WORDS];
        for (size_t i = 0; i < count; i++) {
            static const int TO[] = {0, 1, 2, 60, 61, 1000, 65535};
            for (size_t k = 0; k < sizeof TO / sizeof TO[0]; k++) {
                memcpy(words, choices ? CHOICES : ROWS, count * sizeof words[0]);
                words[i] = TO[k];
                write_eval("bad.bin", choices ? CHOICES_HEAD : ROWS_HEAD, words, count);
                if (eval_open(&e, "bad.bin", V, T, &err)) eval_close(&e);
            }
        }
    }
    check(c, refused, "refused: truncated anywhere");
}

int main(void) {
    static Check c;
    static char folder[] = "build/test_eval.XXXXXX";
    if (!mkdtemp(folder) || chdir(folder)) die("cannot make", folder);
    test_layouts(&c);
    test_wide(&c);
    test_larger(&c);
    test_refusals(&c);
    test_damage(&c);
    if (chdir("../..") == 0) remove_tree(folder);
    return check_summary(&c);
}
