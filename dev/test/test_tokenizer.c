// test_tokenizer.c: tests bytes, byte-level BPE from tokenizer.json, damaged tokenizer
// files, and drawing from logits.
//
//   test_tokenizer                  the tests
//   test_tokenizer --fixture FILE [KIND]  writes the small tokenizer.json of the tests: gpt2,
//                                         llama3, qwen2 or smollm2
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "llmc/host/tokenizer_kinds.h"

#include <time.h>

#include "dev/test/check.h"
#include "dev/test/files.h"

static Check checks;
static char path[256];

// Merges as GPT-2's file has them, a line each. \304\240 is a blank, \304\212 the end of a line.
static const char MERGES[] =
    "h e\nl l\nhe ll\nhell o\n\304\240 w\no r\n\304\240w or\nl d\n\304\240wor ld\n"
    "\304\240 \304\240\n' s\n1 2\n\303\203 \302\251\n\304\212 \304\212\na a\naa a\n"
    "\304\240\304\240 \304\240\304\240\n\304\240 1\n\303\246 \304\271\n"
    "\303\246\304\271 \302\245\n' l\n'l l\ns \304\240\n< |\n";
enum { MERGE_COUNT = 24 };

// Writes the character by which a vocabulary writes a byte, and a NUL. Returns its length.
static size_t byte_to_utf8(int byte, char out[3]) {
    unsigned c = 0;
    while (character_to_byte(c) != byte) c++;
    size_t n = c < 128 ? 1 : 2;
    out[0] = (char)(n == 1 ? c : 0xc0 | c >> 6);
    out[n - 1] = (char)(n == 1 ? c : 0x80 | (c & 0x3f));
    out[n] = '\0';
    return n;
}

// Appends a part of a name, quoted for JSON where need be.
static size_t print_name(char *out, const char *name, size_t bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (name[i] == '"' || name[i] == '\\') out[n++] = '\\';
        out[n++] = name[i];
    }
    return n;
}

// Appends ,"NAME":NUMBER of a byte.
static size_t print_byte(char *out, int byte, size_t number) {
    char name[3];
    size_t n = (size_t)sprintf(out, ",\"");
    n += print_name(out + n, name, byte_to_utf8(byte, name));
    return n + (size_t)sprintf(out + n, "\":%zu", number);
}

// Appends the tokens that the merges make, numbered from `first` on, `more` tokens, and the
// merges; ends the file.
static void print_merges(char *out, const char *merges, size_t first, const char *more,
                         bool pairs) {
    for (const char *line = merges; *line; line = strchr(line, '\n') + 1) {
        size_t left = strcspn(line, " "), right = strcspn(line + left + 1, "\n");
        out += sprintf(out, ",\"");
        out += print_name(out, line, left);
        out += print_name(out, line + left + 1, right);
        out += sprintf(out, "\":%zu", first++);
    }
    out += sprintf(out, "%s},\"merges\":[", more);
    for (const char *line = merges; *line; line = strchr(line, '\n') + 1) {
        size_t left = strcspn(line, " "), right = strcspn(line + left + 1, "\n");
        out += sprintf(out, "%s%s", line != merges ? "," : "", pairs ? "[\"" : "\"");
        out += print_name(out, line, left);
        out += sprintf(out, "%s", pairs ? "\",\"" : " ");
        out += print_name(out, line + left + 1, right);
        out += sprintf(out, "%s", pairs ? "\"]" : "\"");
    }
    sprintf(out, "]}}");
}

// The rules of train_llama's models: how text is normalised and split into words, and if
// merges are ignored.
#define BYTE_LEVEL(regex)                                                       \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true," \
    "\"use_regex\":" regex "}"
#define LIST(first, regex) \
    "{\"type\":\"Sequence\",\"pretokenizers\":[" first "," BYTE_LEVEL(regex) "]}"
#define SPLIT(regex)                                      \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex \
    "\"},\"behavior\":\"Isolated\","                      \
    "\"invert\":false}"
#define WORDS(digits)                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}" digits \
    "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
typedef struct {
    const char *name, *splitter, *normalizer;
    bool ignore_merges;
} Kind;
static const Kind KINDS[] = {
    {"gpt2", BYTE_LEVEL("true"), "null", false},
    {"llama3", LIST(SPLIT(WORDS("{1,3}")), "false"), "null", true},
    {"qwen2", LIST(SPLIT(WORDS("")), "false"), "{\"type\":\"NFC\"}", false},
    {"smollm2", LIST("{\"type\":\"Digits\",\"individual_digits\":true}", "true"), "null", false},
};
enum { KIND_COUNT = sizeof KINDS / sizeof KINDS[0] };

// Three tokens that no merges make: only ignore_merges finds them.
static const char UNMERGED[] = ",\"llo\":281,\"\xc4\xa0world's\":282,\"123\":283";

// Returns the JSON of a tokenizer: tokens 0 to 255 are the bytes, 256 is <|endoftext|>, then the
// merges. pairs: merges are written ["a", "b"] instead of "a b".
static char *make_fixture(bool pairs, const Kind *kind) {
    char *text = malloc(32768);
    if (!text) exit(1);
    size_t n = (size_t)sprintf(
        text,
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":["
        "{\"id\":256,\"content\":\"<|endoftext|>\",\"single_word\":false,\"lstrip\":false,"
        "\"rstrip\":false,"
        "\"normalized\":false,\"special\":true},{\"id\":%d,\"content\":\"<|end\",\"single_word\":"
        "false,\"lstrip\":"
        "false,"
        "\"rstrip\":false,\"normalized\":false,\"special\":true}],\"normalizer\":%s,\"pre_"
        "tokenizer\":%s,"
        "\"post_processor\":null,"
        "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true,"
        "\"use_regex\":true},"
        "\"model\":{"
        "\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":\"\","
        "\"end_of_word_"
        "suffix\":\"\","
        "\"fuse_unk\":false,\"ignore_merges\":%s,\"vocab\":{\"<|endoftext|>\":256",
        257 + MERGE_COUNT + (kind->ignore_merges ? 3 : 0), kind->normalizer, kind->splitter,
        kind->ignore_merges ? "true" : "false");
    for (int byte = 0; byte < 256; byte++) n += print_byte(text + n, byte, (size_t)byte);
    print_merges(text + n, MERGES, 257, kind->ignore_merges ? UNMERGED : "", pairs);
    return text;
}

static void write_fixture(bool pairs, const Kind *kind) {
    char *json = make_fixture(pairs, kind);
    write_text(path, json);
    free(json);
}

// Returns true if the tokens decode to the text.
static bool decodes_to(const Tokenizer *tk, const int *tokens, size_t count, const char *text,
                       size_t bytes) {
    size_t at = 0, n;
    for (size_t i = 0; i < count; i++) {
        const char *part = tokenizer_decode(tk, tokens[i], &n);
        if (n > bytes - at || memcmp(text + at, part, n) != 0) return false;
        at += n;
    }
    return at == bytes;
}

static void test_bytes(void) {
    Tokenizer tk;
    Error err;
    char text[256];
    int tokens[256];
    size_t n;
    if (!check(&checks, tokenizer_open(&tk, NULL, &err) && tk.vocabulary == 256,
               "byte tokenizer"))
        return;
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    n = tokenizer_encode(&tk, text, 256, tokens);
    bool ok = n == 256 && decodes_to(&tk, tokens, n, text, n);
    for (int i = 0; i < 256; i++) ok &= tokens[i] == i;
    check(&checks, ok, "bytes: each byte is its own token");
    const char *mixed = "a<|endoftext|><|endoftext|>b<|endoftext|";
    n = tokenizer_encode(&tk, mixed, strlen(mixed), tokens);
    check(&checks, n == 4 + 13 - 1 && tokens[1] == 256 && tokens[2] == 256 && tokens[3] == 'b' &&
          decodes_to(&tk, tokens, n, mixed, strlen(mixed)), "bytes: <|endoftext|> within text");
    ok = tokenizer_decode(&tk, -1, &n) && n == 0 && tokenizer_decode(&tk, 257, &n) && n == 0;
    check(&checks, ok && tokenizer_encode(&tk, "", 0, tokens) == 0,
          "bytes: no text and no such token");
    int *prompt;
    ok = tokenizer_prompt(&tk, NULL, 257, &prompt, &n, &err) && n == 1 && prompt[0] == 256;
    free(prompt);
    ok &= tokenizer_prompt(&tk, "ab", 257, &prompt, &n, &err) && n == 2 && prompt[0] == 'a' &&
          prompt[1] == 'b';
    free(prompt);
    ok &= !tokenizer_prompt(&tk, NULL, 61, &prompt, &n, &err) &&
          says(&err, "the model's vocabulary has 61");
    free(prompt);
    check(&checks, ok, "prompts: default, text, a vocabulary that is too small");
    tokenizer_free(&tk);
}

// The package tokenizers gives these tokens with the file that --fixture writes.
typedef struct {
    const char *text;
    int count;
    int tokens[40];
} EncodeCase;

static const EncodeCase ENCODED[] = {
    {"hello world", 2, {260, 265}},
    {"hello  world", 3, {260, 32, 265}},
    {" hello   world \n\n x", 8, {32, 260, 266, 265, 32, 270, 32, 120}},
    {"he'll she's we're I'd I'M 'sx 's", 27, {257, 39,  258, 32, 115, 257, 267, 261, 101,
                                              39,  114, 101, 32, 73,  39,  100, 32,  73,
                                              39,  77,  32,  39, 115, 120, 32,  39,  115}},
    {"aaaaaaa aa a aaa", 9, {271, 271, 272, 32, 271, 32, 97, 32, 272}},
    {"12 112 1212 a12b", 10, {268, 274, 268, 32, 268, 268, 32, 97, 268, 98}},
    {"caf\303\251 \303\251\303\251 \346\227\245\346\234\254\346\227\245",
     13,
     {99, 97, 102, 269, 32, 269, 269, 32, 276, 230, 156, 172, 276}},
    {"   ", 2, {266, 32}},
    {"\n\n\n hello", 4, {270, 10, 32, 260}},
    {"a<|endoftext|>hello<|endoftext|> world<|endo<|end",
     8,
     {97, 256, 260, 256, 265, 281, 111, 281}},
    {"\302\240x \343\200\200 y\t\tz  ",
     13,
     {194, 160, 120, 32, 227, 128, 128, 32, 121, 9, 9, 122, 266}},
    {"\331\243\331\244a\314\201b \360\237\230\200hello!!! 's",
     20,
     {217, 163, 217, 164, 97, 204, 129, 98, 32, 240,
      159, 152, 128, 260, 33, 33,  33,  32, 39, 115}},
    {"x\342\200\213s \342\200\250  w", 11, {120, 226, 128, 139, 115, 32, 226, 128, 168, 32, 261}},
    {"<| <|endoftext|", 10, {280, 32, 281, 111, 102, 116, 101, 120, 116, 124}},
    {"\302\275\302\262 \342\205\253 hello1world",
     14,
     {194, 189, 194, 178, 32, 226, 133, 171, 32, 260, 49, 119, 262, 264}},
    {"'ll 'l l'lll", 10, {39, 258, 32, 39, 108, 32, 108, 39, 258, 108}},
    {"", 0, {0}},
};

static void check_encoded(const Tokenizer *tk, const char *what, const EncodeCase *cases,
                          size_t count) {
    bool ok = true;
    for (size_t i = 0; i < count; i++) {
        const EncodeCase *c = &cases[i];
        int tokens[256];
        size_t n = tokenizer_encode(tk, c->text, strlen(c->text), tokens);
        bool same = n == (size_t)c->count && memcmp(tokens, c->tokens, n * sizeof(int)) == 0;
        same &= decodes_to(tk, tokens, n, c->text, strlen(c->text));
        if (!same) printf("     case %zu: '%s'\n", i, c->text);
        ok &= same;
    }
    check(&checks, ok, "%s: %zu texts become the tokens of the reference", what, count);
}

static void test_bpe(void) {
    static const char pieces[] = "ahelo wrd's12 \n\xc3\xa9\xe6\x97\xa5\xf0<|end";
    Error err;
    for (int pairs = 0; pairs < 2; pairs++) {
        Tokenizer tk;
        write_fixture(pairs, KINDS);
        bool opened = tokenizer_open(&tk, path, &err) && tk.vocabulary == 257 + MERGE_COUNT;
        if (!check(&checks, opened, "tokenizer.json with merges as %s", pairs ? "pairs" : "text"))
            return;
        check_encoded(&tk, "BPE", ENCODED, sizeof ENCODED / sizeof ENCODED[0]);
        bool ok = true;  // any bytes, valid UTF-8 or not, survive
        uint32_t random = 1;
        for (int round = 0; round < 2000; round++) {
            char text[64];
            int tokens[64];
            size_t bytes = (size_t)round % 64;
            for (size_t i = 0; i < bytes; i++) {
                random = random * 1664525u + 1013904223u;
                text[i] = round % 2 ? (char)(random >> 24)
                                    : pieces[(random >> 16) % (sizeof pieces - 1)];
            }
            size_t n = tokenizer_encode(&tk, text, bytes, tokens);
            ok &= n <= bytes && decodes_to(&tk, tokens, n, text, bytes);
        }
        check(&checks, ok, "BPE: 2000 random texts come back");
        tokenizer_free(&tk);
    }
}

static void test_damage(void) {
    static const struct { const char *what, *text, *says;
    } cases[] = {
        {"empty", "", "not valid JSON"},
        {"array", "[]", "not a JSON object"},
        {"nothing", "{}", "pre_tokenizer"},
        {"another splitter",
         "{\"model\":{\"type\":\"BPE\"},\"pre_tokenizer\":{\"type\":\"Metaspace\"}}",
         "pre_tokenizer"},
        {"no splitter", "{\"model\":{\"type\":\"BPE\"}}", "pre_tokenizer"},
#define MODEL_BPE "\"model\":{\"type\":\"BPE\","
#define START "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
        {"no model", START "\"version\":\"1.0\"}", "\"model\" ? is not"},
        {"another model", START "\"model\":{\"type\":\"WordPiece\",\"vocab\":{\"a\":1}}}",
         "\"model\" WordPiece"},
        {"prefix space",
         "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true},\"model\":{}}",
         "pre_tokenizer"},
        {"pieces without a regular expression",
         "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":false},\"model\":{}}",
         "pre_tokenizer"},
        {"normalizer", START "\"normalizer\":{\"type\":\"NFC\"},\"model\":{}}", "normalizer"},
        {"dropout", START MODEL_BPE "\"dropout\":0.1}}", "dropout"},
        {"no vocabulary", START MODEL_BPE "\"merges\":[]}}", "vocab, merges"},
        {"no merges", START MODEL_BPE "\"vocab\":{}}}", "vocab, merges"},
        {"nothing in it", START MODEL_BPE "\"vocab\":{},\"merges\":[]}}", "empty or malformed"},
        {"negative number", START MODEL_BPE "\"vocab\":{\"a\":-1},\"merges\":[]}}",
         "a number of its own"},
        {"huge number", START MODEL_BPE "\"vocab\":{\"a\":1e300},\"merges\":[]}}",
         "a number of its own"},
        {"number past the limit", START MODEL_BPE "\"vocab\":{\"a\":4194304},\"merges\":[]}}",
         "a number of its own"},
        {"number twice", START MODEL_BPE "\"vocab\":{\"a\":1,\"b\":1},\"merges\":[]}}",
         "a number of its own"},
        {"merge of unknown tokens", START MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[\"a b\"]}}",
         "merge 0 is no pair"},
        {"merge into nothing", START MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[\"a a\"]}}",
         "merge 0 is no pair"},
        {"merge of one", START MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[\"a\"]}}", "no pair"},
        {"merge of three",
         START MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[[\"a\",\"a\",\"a\"]]}}", "no pair"},
        {"merge of numbers", START MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[[1,2]]}}",
         "no pair"},
        {"added without id",
         START "\"added_tokens\":[{\"content\":\"x\"}]," MODEL_BPE
               "\"vocab\":{\"a\":1},\"merges\":[]}}",
         "the token \"x\" needs a number"},
        {"added is a number",
         START "\"added_tokens\":[1]," MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[]}}",
         "a number of its own"},
        {"added is an object",
         START "\"added_tokens\":{}," MODEL_BPE "\"vocab\":{\"a\":1},\"merges\":[]}}",
         "malformed"},
    };
    Error err;
    Tokenizer tk;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(path, cases[i].text);
        check(&checks, !tokenizer_open(&tk, path, &err) && says(&err, cases[i].says),
              "tokenizer.json: %s", cases[i].what);
    }
    write_text(path, START "\"added_tokens\":[{\"id\":9,\"content\":\"\"}]," MODEL_BPE
                           "\"vocab\":{\"a\":1,\"aa\":7},"
                           "\"merges\":[\"a a\"]}}");
    int tokens[8], *prompt;
    size_t n = 0;
    bool ok = tokenizer_open(&tk, path, &err) && tk.vocabulary == 2 && tk.added == 0;
    if (ok) {
        n = tokenizer_encode(&tk, "aaxa", 4, tokens);
        ok = n == 2 && tokens[0] == 7 && tokens[1] == 1 && tokenizer_decode(&tk, 3, &n) && n == 0;
        ok &= !tokenizer_prompt(&tk, "xyz", 10, &prompt, &n, &err) &&
              says(&err, "no token for this");
        free(prompt);
        ok &= !tokenizer_prompt(&tk, NULL, 10, &prompt, &n, &err) && says(&err, "give a --prompt");
        tokenizer_free(&tk);
    }
    check(&checks, ok, "tokenizer.json: gaps, missing bytes, empty added token");
    // Any number of added tokens; a text that begins like all of them takes no longer for it.
    enum { MANY = 100000, BYTES = 1 << 18 };
    for (int longer = 0; longer < 2; longer++) {
        int digits = ADDED_MAX_BYTES - 1 + longer;
        FILE *f = fopen(path, "wb");
        fprintf(f, START MODEL_BPE "\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[");
        for (int i = 0; i < MANY; i++)
            fprintf(f, "%s{\"id\":%d,\"content\":\"<%0*d\"}", i ? "," : "", i + 1,
                    i ? 30 : digits, i + 1);
        fprintf(f, "]}");
        fclose(f);
        ok = tokenizer_open(&tk, path, &err);
        if (longer) ok = !ok && says(&err, "has more than 256 bytes");
        check(&checks, ok, "tokenizer.json: %d added tokens, one of %d bytes", MANY, digits + 1);
        if (longer || !ok) continue;
        char *text = malloc(BYTES);
        int *numbers = malloc(BYTES * sizeof(int));
        if (!text || !numbers) exit(1);
        for (int i = 0; i < BYTES; i++) text[i] = i % 30 ? '0' : '<';
        clock_t begin = clock();
        n = tokenizer_encode(&tk, text, BYTES, numbers);
        double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
        check(&checks, n == 0 && seconds < 5,
              "and 256 KiB that begin like them take %.2f s, at most 5", seconds);
        n = tokenizer_encode(&tk, "a<000000000000000000000000099999a", 33, numbers);
        check(&checks, n == 3 && numbers[1] == 99999, "and each is found");
        free(numbers);
        free(text);
        tokenizer_free(&tk);
    }
    char *json = make_fixture(false, KINDS);
    ok = true;
    for (size_t length = strlen(json) - 1; length > 0; length -= length > 600 ? 37 : 1) {
        json[length] = '\0';
        write_text(path, json);
        ok &= !tokenizer_open(&tk, path, &err) && says(&err, "not valid JSON");
    }
    free(json);
    check(&checks, ok, "tokenizer.json: truncations are refused");
    unlink(path);
    check(&checks, !tokenizer_open(&tk, path, &err) && says(&err, "No such file"),
          "tokenizer.json: missing");
}

static void test_characters(void) {
    bool ok = character_to_byte(' ') == -1 && character_to_byte(0x120) == ' ', seen[256] = {false};
    for (unsigned c = 0; c < 324; c++) {
        int byte = character_to_byte(c);
        char name[3], text[3];
        if (byte < 0) continue;
        ok &= byte < 256 && !seen[byte] && (c >= 256 || (int)c == byte);
        seen[byte] = true;
        bool named = true;
        ok &= byte_to_utf8(byte, name) == strlen(name) && name_to_bytes(name, text, &named) == 1;
        ok &= text[0] == (char)byte && !named;
    }
    for (int byte = 0; byte < 256; byte++) ok &= seen[byte];
    for (unsigned c = 324; c < 1000; c++) ok &= character_to_byte(c) == -1;
    check(&checks, ok, "bytes as characters");
    static const char *const strange[] = {"\xe6\x97\xa5", "a b", "\xc1\x81", "\xc3", "\xc5\x84"};
    for (int i = 0; i < 5; i++) {
        char out[8];
        size_t n = strlen(strange[i]);
        bool named = true;
        ok &= name_to_bytes(strange[i], out, &named) == n && memcmp(out, strange[i], n) == 0 &&
              named;
    }
    check(&checks, ok, "names with other characters stand for themselves");
}

// GPT-2's tokenizer.json from its merges, a line each, as OpenAI published them under the MIT
// licence. Tokens 0 to 255 are the bytes, in the order of their characters, then come the merges,
// and <|endoftext|> is the last.
static bool write_gpt2(Error *err) {
    size_t bytes, count = 0, n;
    char *lines = file_read("dev/test/tokenizer/gpt2_merges.txt", 1 << 20, &bytes, err);
    if (!lines) return false;
    char *text = malloc(6 * bytes);
    if (!text) exit(1);
    n = (size_t)sprintf(
        text,
        "{\"added_tokens\":[{\"id\":50256,\"content\":\"<|endoftext|>\"}],\"pre_tokenizer\":"
        "{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"<|endoftext|>\":"
        "50256");
    for (unsigned c = 0; c < 324; c++) {
        if (character_to_byte(c) >= 0) n += print_byte(text + n, character_to_byte(c), count++);
    }
    print_merges(text + n, lines, count, "", false);
    write_text(path, text);
    free(lines);
    free(text);
    return true;
}

// Each byte that is no UTF-8 is a sign. U+180E is no space and U+0085 is one: PCRE2's \\s and
// older versions of Unicode have them in other classes.
static const EncodeCase GPT2_ENCODED[] = {
    {"!\xff\xff? \xff\xfe", 7, {0, 187, 187, 30, 220, 187, 186}},
    {" \xe6\x97 a\xe6\x97\xa5\xa5", 6, {10545, 245, 257, 33768, 98, 98}},
    {"\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80\xf8\x88\x80\x80\x80",
     14,
     {124, 222, 169, 254, 222, 176, 238, 222, 222, 180, 230, 222, 222, 222}},
    {"a\xf0\x9f  \xff  \xc3", 7, {64, 8582, 220, 220, 187, 220, 6184}},
    {"\xe1\xa0\x8e  \xe1\xa0\x8ex \xc2\x85 y\xc2\x85\xc2\x85z",
     16,
     {157, 254, 236, 220, 28053, 254, 236, 87, 1587, 227, 331, 126, 227, 126, 227, 89}},
    {"it'\xffs 'll\xff", 7, {270, 6, 187, 82, 705, 297, 187}},
};

// Encodes a word so long that a quadratic encoder would need minutes. Checks only that decoding
// gives it back.
static void test_long_word(const Tokenizer *tk, const char *what, const char *alphabet) {
    size_t bytes = 1 << 18, n;
    char *text = malloc(bytes);
    int *tokens = malloc(bytes * sizeof(int));
    if (!text || !tokens) exit(1);
    uint32_t random = 1;
    for (size_t i = 0; i < bytes; i++) {
        random = random * 1664525u + 1013904223u;
        text[i] = alphabet[(random >> 16) % strlen(alphabet)];
    }
    clock_t begin = clock();
    n = tokenizer_encode(tk, text, bytes, tokens);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    check(&checks, decodes_to(tk, tokens, n, text, bytes) && seconds < 10.0,
          "GPT-2: a word of 256 KiB of %s in %.2f s, at most 10 (%zu tokens)", what, seconds, n);
    free(text);
    free(tokens);
}

// Opens a tokenizer.json as train_llama does, which samples with that prompt.
static bool open_kind(Tokenizer *tk, const char *file, const char *prompt, Error *err) {
    Options o;
    memset(&o, 0, sizeof o);
    o.tokenizer = file, o.prompt = prompt, o.sample_every = 1;
    return tokenizer_open_kind(tk, &o, err);
}

// Compares with the tokens of another encoder: the lines {"kind": K, "text": T, "tokens": [...]}
// of one kind. Returns the number of lines.
static size_t compare_cases(const Tokenizer *tk, const char *file, const char *kind, size_t *same) {
    Error err;
    size_t bytes, count = 0;
    char *cases = file_read(file, 1 << 20, &bytes, &err), *line, *rest = cases;
    *same = 0;
    while (cases && (line = strtok_r(rest, "\n", &rest))) {
        cJSON *root = json_parse(line, strlen(line), file, &err);
        const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(root, "text"));
        const char *of = cJSON_GetStringValue(cJSON_GetObjectItem(root, "kind"));
        const cJSON *expected = cJSON_GetObjectItem(root, "tokens"),
                    *token = expected ? expected->child : NULL;
        if (!text || !expected) break;
        if (!kind || (of && strcmp(of, kind) == 0)) {
            size_t length = strlen(text);
            int *tokens = malloc((length + 1) * sizeof(int));
            if (!tokens) exit(1);
            size_t n = tokenizer_encode(tk, text, length, tokens);
            bool ok = n == (size_t)cJSON_GetArraySize(expected) &&
                      decodes_to(tk, tokens, n, text, length);
            for (size_t i = 0; i < n && ok; i++, token = token->next)
                ok = tokens[i] == token->valueint;
            if (!ok) printf("     line %zu: '%.60s...'\n", count + 1, text);
            *same += ok;
            count++;
            free(tokens);
        }
        cJSON_Delete(root);
    }
    free(cases);
    return count;
}

// dev/data/golden_tokenizers.py has written the cases.
static void test_kinds(void) {
    for (int i = 1; i < KIND_COUNT; i++) {
        Tokenizer tk;
        Error err;
        size_t count, same;
        write_fixture(false, &KINDS[i]);
        bool refused = !tokenizer_open(&tk, path, &err) &&
                       says(&err, "no byte-level BPE like GPT-2's");
        check(&checks, refused, "%s: refused where GPT-2's kind is expected", KINDS[i].name);
        if (!check(&checks, open_kind(&tk, path, "plain", &err), "%s: tokenizer.json",
                   KINDS[i].name)) {
            printf("     %s\n", err.text);
            continue;
        }
        count = compare_cases(&tk, "dev/test/tokenizer/kinds.jsonl", KINDS[i].name, &same);
        check(&checks, count == 120 && same == count,
              "%s: %zu of 120 texts become the tokens of another encoder", KINDS[i].name, same);
        tokenizer_free(&tk);
        bool composed = open_kind(&tk, path, "caf\xc3\xa9", &err);
        if (composed) tokenizer_free(&tk);
        bool marked = open_kind(&tk, path, "cafe\xcc\x81", &err);
        if (marked) tokenizer_free(&tk);
        bool normal = KINDS[i].normalizer[0] == '{';
        check(&checks,
              composed && marked == !normal &&
                  (marked || says(&err, "may change a character of --prompt")),
              "%s: a prompt with a combining accent is %s", KINDS[i].name,
              normal ? "refused" : "taken");
    }
}

// Applies an edit: [path, value], or [path] to remove.
static void apply_edit(cJSON *root, const cJSON *edit) {
    cJSON *at = root;
    const cJSON *step = edit->child->child, *value = edit->child->next;
    for (; step->next; step = step->next) {
        at = cJSON_IsString(step) ? cJSON_GetObjectItemCaseSensitive(at, step->valuestring)
                                  : cJSON_GetArrayItem(at, step->valueint);
    }
    if (cJSON_IsString(step)) {
        cJSON_DeleteItemFromObjectCaseSensitive(at, step->valuestring);
        if (value) cJSON_AddItemToObject(at, step->valuestring, cJSON_Duplicate(value, true));
    } else if (step->valueint < cJSON_GetArraySize(at)) {
        cJSON_ReplaceItemInArray(at, step->valueint, cJSON_Duplicate(value, true));
    } else {
        cJSON_AddItemToArray(at, cJSON_Duplicate(value, true));
    }
}

// Opens the file at `path`. Returns true if the text has the tokens of the package
// tokenizers, or if the refusal names the key or its object.
static bool key_is_kept(const cJSON *line, bool plain) {
    Tokenizer tk;
    Error err = {""};
    const char *key = cJSON_GetObjectItem(line, "key")->valuestring, *name = strchr(key, '.') + 1;
    const char *text = cJSON_GetObjectItem(line, "text")->valuestring;
    const cJSON *expected = cJSON_GetObjectItem(line, "tokens"), *token = expected->child;
    if (!(plain ? tokenizer_open(&tk, path, &err) : open_kind(&tk, path, text, &err))) {
        char object[64];
        snprintf(object, sizeof object, "%.*s", (int)(name - key - 1), key);
        if (!cJSON_IsTrue(cJSON_GetObjectItem(line, "reads")) && says(&err, path) &&
            (strstr(err.text, name) || strstr(err.text, object))) return true;
        printf("     %s: %s\n", key, err.text);
        return false;
    }
    int *tokens = NULL;
    size_t n = 0;
    bool same = tokenizer_prompt(&tk, text, 1000, &tokens, &n, &err) && cJSON_IsArray(expected) &&
                n == (size_t)cJSON_GetArraySize(expected);
    for (size_t i = 0; i < n && same; i++, token = token->next) same = tokens[i] == token->valueint;
    if (!same) {
        printf("     %s: '%s' has other tokens:", key, text);
        for (size_t i = 0; i < n && tokens; i++) printf(" %d", tokens[i]);
        printf("\n");
    }
    free(tokens);
    tokenizer_free(&tk);
    return same;
}

// Turns on every key of the format, and one more in each object, as
// dev/data/golden_tokenizers.py has done. No key is ignored silently.
static void test_keys(void) {
    Error err;
    size_t bytes, count = 0, kept = 0, reads = 0;
    bool seen[TOKENIZER_KEY_COUNT] = {false};
    char *lines = file_read("dev/test/tokenizer/keys.jsonl", 1 << 20, &bytes, &err),
         *rest = lines, *text;
    while (lines && (text = strtok_r(rest, "\n", &rest))) {
        cJSON *line = json_parse(text, strlen(text), "keys.jsonl", &err);
        if (!line) break;
        const char *key = cJSON_GetObjectItem(line, "key")->valuestring;
        const Kind *kind = KINDS;
        while (strcmp(kind->name, cJSON_GetObjectItem(line, "kind")->valuestring) != 0) kind++;
        char *json = make_fixture(false, kind), name[64];
        cJSON *root = json_parse(json, strlen(json), path, &err);
        const cJSON *edit;
        cJSON_ArrayForEach(edit, cJSON_GetObjectItem(line, "edits")) apply_edit(root, edit);
        free(json);
        json = cJSON_Print(root);
        write_text(path, json);
        bool ok = key_is_kept(line, false);
        ok = (kind != KINDS || key_is_kept(line, true)) && ok;
        if (!ok) printf("     in line %zu\n", count + 1);
        count++;
        kept += ok;
        reads += cJSON_IsTrue(cJSON_GetObjectItem(line, "reads"));
        for (int i = 0; i < TOKENIZER_KEY_COUNT; i++) {
            snprintf(name, sizeof name, "%s.%s", TOKENIZER_KEYS[i].object, TOKENIZER_KEYS[i].key);
            seen[i] = seen[i] || strcmp(name, key) == 0;
        }
        free(json);
        cJSON_Delete(root);
        cJSON_Delete(line);
    }
    free(lines);
    check(&checks, count >= 100 && kept == count,
          "keys: %zu of %zu files give the reference's tokens (%zu must) or are "
          "refused by the key",
          kept, count, reads);
    for (int i = 0; i < TOKENIZER_KEY_COUNT; i++) {
        check(&checks, seen[i], "keys: %s of %s is among them", TOKENIZER_KEYS[i].key,
              TOKENIZER_KEYS[i].object);
    }
}

static void test_kinds_refused(void) {
#define BPE(member) "{\"model\":{\"type\":\"BPE\"}," member "}"
#define MODEL(model) "{\"pre_tokenizer\":" BYTE_LEVEL("true") ",\"model\":" model "}"
#define BPE_SPLIT(first) BPE("\"pre_tokenizer\":" LIST(first, "false"))
    static const struct { const char *what, *text, *says;
    } cases[] = {
        {"sentencepiece's Unigram", MODEL("{\"type\":\"Unigram\",\"vocab\":[]}"),
         "\"model\" Unigram"},
        {"sentencepiece's BPE", MODEL("{\"type\":\"BPE\",\"byte_fallback\":true}"),
         "\"byte_fallback\""},
        {"sentencepiece's spaces", BPE("\"pre_tokenizer\":{\"type\":\"Metaspace\"}"),
         "\"pre_tokenizer\""},
        {"another model", MODEL("{\"type\":\"WordPiece\",\"vocab\":{\"a\":1}}"),
         "\"model\" WordPiece"},
        {"no model", MODEL("null"), "\"model\" ? is not"},
        {"another normalizer", BPE("\"normalizer\":{\"type\":\"Lowercase\"}"),
         "\"normalizer\" Lowercase"},
        {"dropout", MODEL("{\"type\":\"BPE\",\"dropout\":0.1}"), "\"dropout\""},
        {"no splitter", "{\"model\":{\"type\":\"BPE\"}}",
         "\"pre_tokenizer\" does not end with a ByteLevel"},
        {"splits at white space", BPE_SPLIT("{\"type\":\"Whitespace\"}"),
         "\"pre_tokenizer\" Whitespace"},
        {"digits together", BPE_SPLIT("{\"type\":\"Digits\",\"individual_digits\":false}"),
         "\"pre_tokenizer\" Digits"},
        {"a split that drops",
         BPE_SPLIT("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\"}"),
         "\"pre_tokenizer\" Split"},
        {"a split in between",
         BPE_SPLIT("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Isolated\","
                   "\"invert\":true}"),
         "\"invert\" of \"pre_tokenizer\""},
        {"a split by a text",
         BPE_SPLIT("{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},"
                   "\"behavior\":\"Isolated\"}"),
         "\"pre_tokenizer\" Split"},
    };
    static const Kind broken = {"broken", LIST(SPLIT("(a"), "false"), "null", false};
    static const Kind slow = {"slow", LIST(SPLIT("(?:l+)+[xy]"), "false"), "null", false};
    Tokenizer tk;
    Error err;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(path, cases[i].text);
        check(&checks, !open_kind(&tk, path, NULL, &err) && says(&err, cases[i].says),
              "kinds: %s: refused", cases[i].what);
    }
    write_fixture(false, &broken);
    check(&checks, !open_kind(&tk, path, NULL, &err) && says(&err, "PCRE2 cannot split text by"),
          "kinds: a broken regular expression: refused");
    int *tokens = NULL;
    size_t n;
    write_fixture(false, &slow);
    bool ok = open_kind(&tk, path, NULL, &err);
    ok = ok && !tokenizer_prompt(&tk, "llllllllllllllllllllllllllllllllllllllll", 300, &tokens,
                                 &n, &err);
    ok = ok && says(&err, path) && says(&err, "PCRE2 gives up");
    check(&checks, ok,
          "kinds: a pattern that takes PCRE2 too long: a sentence that names the file");
    free(tokens);
    if (ok) tokenizer_free(&tk);
}

static void test_gpt2(void) {
    Tokenizer tk;
    Error err;
    if (!check(&checks,
               write_gpt2(&err) && tokenizer_open(&tk, path, &err) && tk.vocabulary == 50257,
               "GPT-2: tokenizer.json"))
        return;
    size_t same, count = compare_cases(&tk, "dev/test/tokenizer/gpt2_cases.jsonl", NULL, &same);
    check(&checks, count == 400 && same == count,
          "GPT-2: %zu of 400 texts become the tokens of another encoder", same);
    check_encoded(&tk, "GPT-2", GPT2_ENCODED, sizeof GPT2_ENCODED / sizeof GPT2_ENCODED[0]);
    test_long_word(&tk, "a", "a");
    test_long_word(&tk, "spaces", " ");
    test_long_word(&tk, "letters", "abcdefghijklmnopqrstuvwxyz");
    test_long_word(&tk, "bytes that are no UTF-8", "\xff\xfe");
    tokenizer_free(&tk);
}

// Prints tokens into a file and compares. Each byte is a token, so characters span several; one
// token is longer.
static void test_print(void) {
    static const char text[] = END_OF_TEXT "caf\xc3\xa9\n\x1b[2J\x7f\xc2\x9b\xc2\xa0\xff\xe6\x97";
    static const char expected[] = END_OF_TEXT "caf\xc3\xa9\n?[2J??\xc2\xa0???";
    Tokenizer tk;
    Error err;
    int tokens[sizeof text];
    size_t bytes;
    tokenizer_open(&tk, NULL, &err);
    size_t n = tokenizer_encode(&tk, text, strlen(text), tokens);
    fflush(stdout);
    int before = dup(STDOUT_FILENO), fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, STDOUT_FILENO);
    tokenizer_print(&tk, tokens, n);
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    close(fd);
    char *printed = file_read(path, 1000, &bytes, &err);
    check(&checks, printed && bytes == strlen(expected) && memcmp(printed, expected, bytes) == 0,
          "a sample is printed as valid UTF-8 without control characters");
    free(printed);
    tokenizer_free(&tk);
}

static void test_sampler(void) {
    // Equally spaced coins hit each token in proportion to its probability.
    double sum = 0.0, worst = 0.0;
    int counts[10] = {0};
    float few[10] = {0.1f, -1.0f, 2.0f, -INFINITY, 0.5f, 1.9f, -3.0f, 0.0f, 1.0f, -0.5f};
    for (int i = 0; i < 10; i++) sum += exp((double)few[i] / SAMPLE_TEMPERATURE);
    for (int i = 0; i < 100000; i++) counts[sample_token(few, 10, (i + 0.5) / 100000)]++;
    for (int i = 0; i < 10; i++) {
        double difference =
            fabs(counts[i] / 100000.0 - exp((double)few[i] / SAMPLE_TEMPERATURE) / sum);
        if (difference > worst) worst = difference;
    }
    check(&checks, worst < 2e-5 && counts[3] == 0, "sampling: frequencies within %.1g", worst);
    bool ok = true;
    float odd[4] = {NAN, 1.0f, NAN, -1.0f}, none[2] = {NAN, NAN},
          low[3] = {-INFINITY, -INFINITY, -INFINITY};
    for (int i = 0; i < 100; i++) {
        int a = sample_token(odd, 4, i / 100.0), b = sample_token(none, 2, i / 100.0);
        int c = sample_token(low, 3, i / 100.0);
        ok &= (a == 1 || a == 3) && b >= 0 && b < 2 && c >= 0 && c < 3;
    }
    float equal[3] = {5.0f, 5.0f, 5.0f};
    ok &= sample_token(equal, 3, 0.0) == 0 && sample_token(equal, 3, 0.99999999999999994) == 2;
    check(&checks, ok, "sampling: NaN is never drawn, the coin's ends are in range");
}

int main(int argc, char **argv) {
    if ((argc == 3 || argc == 4) && strcmp(argv[1], "--fixture") == 0) {
        const Kind *kind = KINDS;
        for (int i = 0; i < KIND_COUNT && argc == 4; i++)
            kind = strcmp(argv[3], KINDS[i].name) ? kind : &KINDS[i];
        snprintf(path, sizeof path, "%s", argv[2]);
        write_fixture(false, kind);
        return 0;
    }
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/llmc-tokenizer-XXXXXX",
             folder && strlen(folder) < 200 ? folder : "/tmp");
    int fd = mkstemp(path);
    if (fd < 0) {
        perror(path);
        return 1;
    }
    close(fd);
    test_characters();
    test_bytes();
    test_bpe();
    test_gpt2();
    test_kinds();
    test_kinds_refused();
    test_keys();
    test_damage();
    test_print();
    test_sampler();
    unlink(path);
    return check_summary(&checks);
}
