// test_eval_file.c: llmc/host/eval_file.h: both layouts, and every kind of file that it refuses.
#define _GNU_SOURCE
#include "dev/test/check.h"
#include "dev/test/make_inputs.h"
#include "llmc/host/eval_file.h"

enum { V = 61, T = 8, WORDS = 64 };

// A file: eight int32 of header and `count` words, in version 1 of 2 bytes, in version 2 of 4.
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
static const int CHOICES_HEAD[8] = {EVAL_CHOICES_MAGIC, 1, 2, 40};
static const int CHOICES[] = {65535, 28, 0, 1, 2, 3, 1, 2, 3, 1, 4, 2, 5, 6,
                              65535, 28, 1, 0, 2, 2, 7, 8, 1, 9, 3, 1, 2, 3};
enum { ROWS_COUNT = sizeof ROWS / sizeof ROWS[0], CHOICES_COUNT = sizeof CHOICES / sizeof CHOICES[0] };

static bool row_is(const EvalFile *e, size_t i, size_t tokens, size_t first, size_t count, int last) {
    const EvalRow *row = &e->row[i];
    return row->tokens == tokens && row->first == first && row->count == count &&
           eval_token(e, row, tokens - 1) == last;
}

static void test_layouts(Check *c) {
    EvalFile e;
    Error err = {""};
    write_eval("rows.bin", ROWS_HEAD, ROWS, ROWS_COUNT);
    if (!check(c, eval_open(&e, "rows.bin", V, T, &err), "our layout is read %s", err.text)) return;
    check(c, e.kind == EVAL_CLOZE && e.rows == 2 && e.words == 5 && row_is(&e, 0, 4, 2, 2, 13) &&
                 row_is(&e, 1, 3, 1, 1, 22), "rows, masks and words");
    eval_close(&e);
    write_eval("choices.bin", CHOICES_HEAD, CHOICES, CHOICES_COUNT);
    if (!check(c, eval_open(&e, "choices.bin", V, T, &err), "llm.c's layout is read %s", err.text)) return;
    check(c, e.kind == EVAL_CHOICES && e.rows == 4 && e.examples == 2 && e.label[0] == 1 && e.label[1] == 0 &&
                 row_is(&e, 0, 4, 3, 1, 4) && row_is(&e, 1, 5, 3, 2, 6) && row_is(&e, 2, 3, 2, 1, 9) &&
                 row_is(&e, 3, 5, 2, 3, 3) && e.row[1].example == 0 && e.row[2].example == 1,
          "each ending stands behind its context, and alone counts");
    eval_close(&e);
}

// Vocabularies above 65536 have words of four bytes.
static void test_wide(Check *c) {
    enum { LARGE = 128256 };
    static const int rows_head[8] = {EVAL_MAGIC, 2, 1, EVAL_TEXT, LARGE}, rows[] = {3, 1, 2, 5, 65536, LARGE - 1};
    static const int choices_head[8] = {EVAL_CHOICES_MAGIC, 2, 1};
    static const int choices[] = {65535, 44, 0, 1, 2, 1, 100000, 1, 128000, 1, 128001};
    EvalFile e;
    Error err = {""};
    write_eval("wide.bin", rows_head, rows, 6);
    if (!check(c, eval_open(&e, "wide.bin", LARGE, T, &err), "words of 4 bytes are read %s", err.text)) return;
    check(c, row_is(&e, 0, 3, 1, 2, LARGE - 1) && eval_token(&e, &e.row[0], 1) == 65536, "with tokens above 65535");
    eval_close(&e);
    write_eval("bad.bin", rows_head, rows, 5);
    check(c, !eval_open(&e, "bad.bin", LARGE, T, &err) && strstr(err.text, "truncated in row 0"),
          "refused: one word less -> %s", err.text);
    write_eval("bad.bin", (const int[8]){EVAL_MAGIC, 2, 1, EVAL_TEXT, LARGE - 1}, rows, 6);
    check(c, !eval_open(&e, "bad.bin", LARGE - 1, T, &err) && strstr(err.text, "has token 128255 in row 0"),
          "refused: a token >= V -> %s", err.text);
    write_eval("wide.bin", choices_head, choices, 11);
    if (!check(c, eval_open(&e, "wide.bin", LARGE, T, &err), "and llm.c's layout with them %s", err.text)) return;
    check(c, e.rows == 2 && row_is(&e, 0, 2, 1, 1, 128000) && row_is(&e, 1, 2, 1, 1, 128001), "two endings");
    eval_close(&e);
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
    {"unknown kind", "2 rows of kind 3", false, 3, 3, -1, 0},
    {"another vocabulary", "a vocabulary of 50257, and the model's is 61", false, 4, 50257, -1, 0},
    {"a mask longer than the row", "counts 3 tokens from 2 on of row 0, which has 4", false, -1, 0, 2, 3},
    {"a mask behind the row", "counts 2 tokens from 5 on of row 0, which has 4", false, -1, 0, 1, 5},
    {"nothing counts", "counts 0 tokens", false, -1, 0, 2, 0},
    {"the first token counts", "counts 2 tokens from 0 on of row 0", false, -1, 0, 1, 0},
    {"token id >= V", "has token 61 in row 0", false, -1, 0, 4, 61},
    {"a row longer than the model takes", "is truncated in row 0", false, -1, 0, 0, 60},
    {"an example that begins otherwise", "example 1 begins with 65534 instead of 65535", true, -1, 0, 14, 65534},
    {"a label without ending", "its label 2 is none of 2 endings", true, -1, 0, 3, 2},
    {"wrong bytes", "says that it has 26 bytes, but has 28", true, -1, 0, 1, 26},
    {"token id >= V in an ending", "has token 99", true, -1, 0, 10, 99},
    {"an ending behind the end", "is truncated", true, -1, 0, 24, 30},
    {"a context without an ending's tokens", "counts 0 tokens", true, -1, 0, 9, 0},
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
        check(c, refused && strstr(err.text, bad->expected) && strstr(err.text, "bad.bin"), "refused: %s -> %s",
              bad->what, err.text);
        if (!refused) eval_close(&e);
    }
    check(c, !eval_open(&e, "choices.bin", V, 3, &err) && strstr(err.text, "--seq 3 takes 4"),
          "refused: a row longer than --seq -> %s", err.text);
    check(c, !eval_open(&e, "nothing.bin", V, T, &err), "refused: missing -> %s", err.text);
    check(c, !eval_open(&e, ".", V, T, &err), "refused: a folder -> %s", err.text);
}

// One context stands before many endings: the file is no more memory than it is long.
static void test_repeated(Check *c) {
    enum { CONTEXT = 4000, ENDINGS = 14000, MANY = 6 + CONTEXT + 2 * ENDINGS };
    static unsigned char bytes[EVAL_HEADER_BYTES + 2 * MANY];
    EvalFile e;
    Error err = {""};
    const size_t words[] = {EVAL_EXAMPLE, 2 * MANY, 0, 1, ENDINGS, CONTEXT};
    int32_t head[3] = {EVAL_CHOICES_MAGIC, 1, 1};
    memcpy(bytes, head, sizeof head);
    for (size_t i = 0; i < MANY; i++) {
        size_t word = i < 6 ? words[i] : i < 6 + CONTEXT ? 1 : i % 2 == 0 ? 1 : 2;
        bytes[EVAL_HEADER_BYTES + 2 * i] = (unsigned char)(word & 255);
        bytes[EVAL_HEADER_BYTES + 2 * i + 1] = (unsigned char)(word >> 8);
    }
    write_file("many.bin", bytes, EVAL_HEADER_BYTES + 2 * MANY);
    bool read = eval_open(&e, "many.bin", V, CONTEXT, &err);
    check(c, read && e.rows == ENDINGS && e.count == MANY && eval_token(&e, &e.row[ENDINGS - 1], CONTEXT) == 2,
          "a context of 4000 tokens before 14000 endings is kept once %s", err.text);
    if (read) eval_close(&e);
}

// Cut anywhere, a file is refused; with any word changed, it is read or refused, and nothing else happens.
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
    test_refusals(&c);
    test_repeated(&c);
    test_damage(&c);
    if (chdir("../..") == 0) remove_tree(folder);
    return check_summary(&c);
}
