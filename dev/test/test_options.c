// test_options.c: llmc/host/options.h and options_ranks.h: accepted and derived values, and the
// error message of each refusal.
#include "dev/test/check.h"
#include "llmc/grid.h"
#include "llmc/host/options.h"

enum { ALL = OPTIONS_TENSOR | OPTIONS_PIPELINE | OPTIONS_DATA, MAX_WORDS = 64 };

// Parses a command line of words separated by blanks; '' is an empty word.
static bool parse(Options *o, const char *line, unsigned sections, Error *err) {
    static char text[4096];  // options keep pointers into it
    static char program[] = "train_gpt", empty[] = "";
    char *words[MAX_WORDS] = {program}, *rest = text;
    int count = 1;
    snprintf(text, sizeof text, "%s", line);
    while (*rest && count < MAX_WORDS) {
        char *end = rest + strcspn(rest, " ");
        bool last = *end == '\0';
        *end = '\0';
        if (*rest) words[count++] = strcmp(rest, "''") == 0 ? empty : rest;
        rest = last ? end : end + 1;
    }
    return options_parse(o, NULL, count, words,
                         sections ? rank_options(sections) : one_rank_options(), err);
}

static bool resolve(Options *o, const char *line, unsigned sections, size_t ranks,
                    const GPTConfig *file, Error *err) {
    return parse(o, line, sections, err) && options_resolve(o, file, ranks, err);
}

// Returns true if an error is one sentence: not empty, one line, no full stop, no capital at
// its start (the trainer puts "error: " before it).
static bool is_sentence(const Error *err) {
    size_t length = strlen(err->text);
    return length > 10 && length + 1 < sizeof err->text && !strchr(err->text, '\n') &&
           err->text[length - 1] != '.' && !(err->text[0] >= 'A' && err->text[0] <= 'Z');
}

typedef struct {
    const char *line, *expected;  // expected: part of the sentence
    unsigned sections;
    size_t ranks;
} Refusal;

static const Refusal REFUSALS[] = {
    {"--train-date x",
     "unknown flag '--train-date': did you mean --train-data? --help all lists all flags of this "
     "trainer",
     0, 1},
    {"--sterps=3", "unknown flag '--sterps=3': did you mean --steps? --help all lists", 0, 1},
    {"--help no", "'no' is not a flag", 0, 1},
    {"-x", "unknown flag '-x'", 0, 1},
    {"--", "not a flag", 0, 1},
    {"-", "unknown flag '-'", 0, 1},
    {"--layer 3", "unknown flag '--layer': did you mean --layers?", 0, 1},
    {"--layer=3", "unknown flag '--layer=3': did you mean --layers?", 0, 1},
    {"--val 3", "unknown flag '--val'", 0, 1},
    {"--frobnicate 3", "unknown flag '--frobnicate': --help all lists all flags of this trainer",
     0, 1},
    {"--tensor 2", "--tensor is for train_gpt_tp and the trainers after it, not for this trainer",
     0, 2},
    {"--zero=1", "--zero is for train_gpt_3d", 0, 1},
    {"--tenser 2", "unknown flag '--tenser': did you mean --tensor?", ALL, 2},
    {"--tensor 2", "--tensor is for train_gpt_tp", OPTIONS_DATA, 2},
    {"--pipeline=2", "--pipeline is for train_gpt_pp", OPTIONS_TENSOR, 2},
    {"--zero 1", "--zero is for train_gpt_3d", OPTIONS_TENSOR | OPTIONS_PIPELINE, 2},
    {"--tensorial 2", "unknown flag '--tensorial'", 0, 1},
    {"file.bin", "'file.bin' is not a flag", 0, 1},
    {"--steps 3 4", "'4' is not a flag", 0, 1},
    {"--steps", "--steps needs a value", 0, 1},
    {"--seq 8 --steps", "--steps needs a value", 0, 1},
    {"--out --steps 5", "--out needs a value, but '--steps' follows", 0, 1},
    {"--dry-run=1", "unknown flag '--dry-run=1': --dry-run takes no value", 0, 1},
    {"--steps 12x", "--steps must be a whole number from 0 to 1000000000000000, not '12x'", 0, 1},
    {"--steps 1e3", "not '1e3'", 0, 1},
    {"--steps -1", "not '-1'", 0, 1},
    {"--steps +1", "not '+1'", 0, 1},
    {"--steps=", "not ''", 0, 1},
    {"--steps 99999999999999999999", "from 0 to 1000000000000000, not '99999999999999999999'", 0,
     1},
    {"--seed 18446744073709551616", "--seed must be a whole number below 2^64", 0, 1},
    {"--seed x", "whole number", 0, 1},
    {"--layers 0", "--layers must be a whole number from 1 to 5000, not '0'", 0, 1},
    {"--lr nan", "--lr must be a number from 0 to 1000, not 'nan'", 0, 1},
    {"--lr inf", "not 'inf'", 0, 1},
    {"--lr 0x1p3", "not '0x1p3'", 0, 1},
    {"--lr 1e-3f", "not '1e-3f'", 0, 1},
    {"--lr 1e999", "from 0 to 1000, not '1e999'", 0, 1},
    {"--lr -1e-3", "from 0 to 1000, not '-1e-3'", 0, 1},
    {"--lr ''", "must be a number from 0 to 1000, not ''", 0, 1},
    {"--lr-final 1.5", "--lr-final must be a number from 0 to 1, not", 0, 1},
    {"--beta2 1", "--beta2 must be a number from 0 to 0.99999999, not '1'", 0, 1},
    {"--shuffle yes", "--shuffle must be one of 0|1", 0, 1},
    {"--recompute all", "--recompute must be one of none|gelu|layer", 0, 1},
    {"--recompute rest", "--recompute must be one of none|gelu|layer", 0, 1},
    {"--recompute gel", "must be one of", 0, 1},
    {"--model d13", "--model must be one of d12|d24|d36|d48", 0, 1},
    {"--out ''", "--out must be a text that is not empty", 0, 1},
    {"", "--train-data is missing", 0, 1},
    {"--init x --steps 0", "--train-data is missing", 0, 1},
    {"--init x --steps 0 --sample-every 1 --out y", "--train-data is missing", 0, 1},
    {"--init x --steps 1 --sample-every 1", "--train-data is missing", 0, 1},
    {"--train-data x --channels 100 --heads 3", "--heads 3 does not divide --channels 100", 0, 1},
    {"--train-data x --seq 65 --max-seq 64", "--seq 65 is longer", 0, 1},
    {"--train-data x --micro-batch 4 --global-batch 6", "--global-batch 6 is not a multiple", 0,
     1},
    {"--train-data x --micro-batch 2 --global-batch 6 --data 2", "times the data ranks", ALL, 2},
    {"--train-data x --val-every 5", "--val-every 5 needs --val-data", 0, 1},
    {"--train-data x --global-batch 16 --ramp 4,4", "--ramp needs START,INCREMENT,SAMPLES", 0, 1},
    {"--train-data x --global-batch 16 --ramp 4,4,x", "not '4,4,x'", 0, 1},
    {"--train-data x --global-batch 16 --ramp 4,-4,8", "three whole numbers", 0, 1},
    {"--train-data x --global-batch 16 --ramp 4,4,8,2", "three whole numbers", 0, 1},
    {"--train-data x --global-batch 16 --ramp 4,4,99999999999999999999", "three whole numbers", 0,
     1},
    {"--train-data x --global-batch 16 --ramp 4,0,100", "--ramp 4,0,100: INCREMENTs must lead", 0,
     1},
    {"--train-data x --global-batch 16 --ramp 4,8,100", "INCREMENTs must lead from START", 0, 1},
    {"--train-data x --global-batch 16 --ramp 0,4,100", "from START, at least 1", 0, 1},
    {"--train-data x --global-batch 16 --ramp 20,4,100", "to --global-batch 16", 0, 1},
    {"--train-data x --global-batch 16 --micro-batch 4 --ramp 6,2,100", "multiples of 4", 0, 1},
    {"--train-data x --global-batch 16 --micro-batch 2 --ramp 2,2,100", "multiples of 4", ALL, 2},
    {"--eval x", "--eval x needs the weights that it measures", 0, 1},
    {"--train-data x --dropout 1", "--dropout must be a number from 0 to 0.99, not '1'", 0, 1},
    {"--train-data x --dropout -0.1", "from 0 to 0.99, not '-0.1'", 0, 1},
    {"--train-data x --save-every 5", "--save-every 5 needs --out", 0, 1},
    {"--train-data x --resume a --init b", "exclude each other", 0, 1},
    {"--train-data x --tensor 3 --heads 4", "--tensor 3 does not divide the 4 heads",
     OPTIONS_TENSOR, 3},
    {"--train-data x --tensor 5 --heads 5 --channels 100", "vocabulary padded to 384",
     OPTIONS_TENSOR, 5},
    {"--train-data x --tensor 4 --seq 6 --sequence-parallel 1", "does not divide --seq 6",
     OPTIONS_TENSOR, 4},
    {"--train-data x --pipeline 3 --virtual 2 --layers 5",
     "5 layers do not fill 3 stages * 2 chunks", OPTIONS_TENSOR | OPTIONS_PIPELINE, 3},
    {"--train-data x --schedule zb --pipeline 2", "one of gpipe|1f1b|interleaved|zb-h1|zb-auto",
     ALL, 2},
    {"--train-data x --schedule zb-h1", "--schedule is for train_gpt_pp and train_gpt_3d",
     OPTIONS_TENSOR, 1},
    {"--train-data x --schedule-file x --schedule 1f1b --pipeline 2", "exclude each other", ALL,
     2},
    {"--train-data x --max-in-flight 3 --pipeline 2",
     "--max-in-flight 3 needs --schedule zb-auto", ALL, 2},
    {"--train-data x --max-in-flight 3 --schedule zb-h1 --pipeline 2", "needs --schedule zb-auto",
     ALL, 2},
    {"--train-data x --max-in-flight 0 --schedule zb-auto",
     "--max-in-flight must be a whole number from 1", ALL, 2},
};

static void test_refusals(Check *c) {
    for (size_t i = 0; i < sizeof REFUSALS / sizeof REFUSALS[0]; i++) {
        const Refusal *r = &REFUSALS[i];
        Options o;
        Error err = {""};
        bool refused = !resolve(&o, r->line, r->sections, r->ranks, NULL, &err);
        check(c, refused && strstr(err.text, r->expected) && is_sentence(&err), "refused: %s -> %s",
              *r->line ? r->line : "(nothing)", err.text);
    }
}

static void test_defaults(Check *c) {
    Options o;
    Error err = {""};
    bool ok = resolve(&o, "--train-data x", 0, 1, NULL, &err);
    check(c,
          ok && o.config.L == 4 && o.config.NH == 4 && o.config.C == 128 && o.config.V == 257 &&
              o.seq == 128 && o.config.maxT == 128 && o.micro_batch == 4 && o.global_batch == 4,
          "default model and batch %s", err.text);
    check(c,
          o.steps == 100 && o.lr == 1e-3 && o.lr_final == 0.1 && o.weight_decay == 0.1 &&
              o.clip == 1.0 && o.beta1 == 0.9 && o.beta2 == 0.95 && o.eps == 1e-8 &&
              o.seed == 1337 && o.keep == 2,
          "default optimizer");
    check(c,
          o.grid.world == 1 && o.grid.t == 1 && o.grid.p == 1 && o.grid.d == 1 &&
              o.val_every == 0 && o.recompute == RECOMPUTE_NONE && !o.help && !o.dry_run &&
              !o.out,
          "the rest is off");
    GPTConfig g = o.config;
    check(c, g.L == 4 && g.C == 128 && g.NH == 4 && g.V == 257 && g.Vp == 384 && g.maxT == 128,
          "configuration");
    ok = resolve(&o, "--train-data x --val-data y", 0, 1, NULL, &err);
    check(c, ok && o.val_every == 20, "--val-data turns validation on");
    ok = resolve(&o, "--train-data x --val-data y --val-every 0", 0, 1, NULL, &err);
    check(c, ok && o.val_every == 0, "--val-every 0 turns it off");
    ok = resolve(&o, "--dry-run", 0, 1, NULL, &err);
    check(c, ok && o.dry_run, "--dry-run needs no data");
    ok = resolve(&o, "--init x --steps 0 --sample-every 1", 0, 1, NULL, &err);
    check(c, ok, "a sample of weights needs no data %s", err.text);
    ok = resolve(&o, "--init x --steps 0 --val-data y", 0, 1, NULL, &err);
    check(c, ok, "nor does a validation %s", err.text);
    ok = parse(&o, "--help --steps 3", 0, &err);
    check(c, ok && o.help == 1 && o.steps == 3, "--help");
    ok = parse(&o, "-h", 0, &err);
    check(c, ok && o.help == 1, "-h");
    ok = parse(&o, "--steps 3 --help all", 0, &err);
    check(c, ok && o.help == 2 && o.steps == 3, "--help all");
    ok = resolve(&o, "--train-data=x --steps 3 --steps=4 --seed 18446744073709551615 --lr 0", 0,
                 1, NULL, &err);
    check(c, ok && o.steps == 4 && o.seed == UINT64_MAX && o.lr == 0,
          "--flag=value, the last one counts");
    ok = resolve(&o, "--train-data x --prompt=--x", 0, 1, NULL, &err);
    check(c, ok && strcmp(o.prompt, "--x") == 0, "a text that begins with -- after =");
    ok = resolve(&o, "--train-data x --prompt ''", 0, 1, NULL, &err);
    check(c, ok && o.prompt[0] == '\0', "an empty prompt");
    ok = resolve(&o, "--train-data x --global-batch 16 --ramp 4,12,99", 0, 1, NULL, &err);
    check(c, ok && o.ramp.start == 4 && o.ramp.increment == 12 && o.ramp.samples == 99,
          "a ramp %s", err.text);
    ok = resolve(&o, "--eval x --init y --train-data z --val-data z --out o --save-every 3", 0, 1,
                 NULL, &err);
    check(c, ok && o.eval && !o.train_data && !o.out && o.steps == 0 && o.val_every == 0,
          "--eval trains nothing %s", err.text);
    ok = resolve(&o, "--train-data x --recompute layer --lr-schedule linear", 0, 1, NULL, &err);
    check(c, ok && o.recompute == RECOMPUTE_LAYER && o.lr_schedule == 1, "choices");
}

static void test_model(Check *c) {
    Options o;
    Error err = {""};
    bool ok = resolve(&o, "--train-data x --model d12", 0, 1, NULL, &err);
    check(c,
          ok && o.config.L == 12 && o.config.NH == 12 && o.config.C == 768 && o.config.V == 50257 &&
              o.config.maxT == 1024 && o.seq == 1024,
          "d12 is GPT-2 small");
    GPTConfig g = o.config;
    check(c, count_parameters(&g) == 124439808 && g.Vp == 50304, "with 124439808 parameters");
    ok = resolve(&o, "--train-data x --model d48", 0, 1, NULL, &err);
    g = o.config;
    check(c, ok && count_parameters(&g) == 1557611200, "d48 is GPT-2 XL with 1557611200");
    ok = resolve(&o, "--train-data x --model d12 --layers 2 --seq 64", 0, 1, NULL, &err);
    check(c, ok && o.config.L == 2 && o.config.C == 768 && o.seq == 64 && o.config.maxT == 1024,
          "a size beside a preset");
    GPTConfig file = {6, 96, 3, 61, 128, 24, NULL};
    ok = resolve(&o, "--train-data x --init y", 0, 1, &file, &err);
    check(c,
          ok && o.config.L == 6 && o.config.C == 96 && o.config.NH == 3 && o.config.V == 61 &&
              o.config.maxT == 24 && o.seq == 24,
          "sizes come from the checkpoint");
    ok = resolve(&o, "--train-data x --init y --layers 6 --seq 8", 0, 1, &file, &err);
    check(c, ok && o.seq == 8 && o.config.maxT == 24,
          "the same size again, and a shorter sequence");
    check(c,
          !resolve(&o, "--train-data x --init y --layers 4", 0, 1, &file, &err) &&
              is_sentence(&err),
          "refused: another size than the checkpoint's -> %s", err.text);
    check(
        c,
        !resolve(&o, "--train-data x --init y --seq 25", 0, 1, &file, &err) && is_sentence(&err),
        "refused: T > max T -> %s", err.text);
}

static void test_grid(Check *c) {
    Options o;
    Error err = {""};
    unsigned tp = OPTIONS_TENSOR, pp = OPTIONS_TENSOR | OPTIONS_PIPELINE;
    bool ok = resolve(&o, "--train-data x", tp, 4, NULL, &err);
    check(c, ok && o.grid.t == 4 && o.grid.p == 1 && o.grid.d == 1, "tensor ranks are all ranks");
    check(c, o.chunks == 1 && o.schedule == SCHEDULE_1F1B && o.zero && o.overlap,
          "the defaults of several ranks");
    check(c,
          !resolve(&o, "--train-data x --tensor 2", tp, 4, NULL, &err) &&
              strstr(err.text, "has 4 ranks"),
          "refused: a grid of fewer ranks -> %s", err.text);
    ok = resolve(&o, "--train-data x --heads 3 --channels 96", tp, 3, NULL, &err);
    check(c, ok && o.grid.t == 3, "three tensor ranks: 3 divides the padded vocabulary 384");
    ok = resolve(&o, "--train-data x --tensor 2", pp, 8, NULL, &err);
    check(c, ok && o.grid.t == 2 && o.grid.p == 4 && o.grid.d == 1, "stages are what is left over");
    ok = resolve(&o, "--train-data x --tensor 2 --pipeline 2", ALL, 8, NULL, &err);
    check(c, ok && o.grid.d == 2 && o.global_batch == 8,
          "so are the data ranks; a micro-batch for each");
    ok = resolve(&o, "--train-data x --pipeline 2 --virtual 2", pp, 2, NULL, &err);
    check(c, ok && o.schedule == SCHEDULE_INTERLEAVED, "--virtual means interleaved");
    ok = resolve(&o, "--train-data x --pipeline 2 --schedule zb-auto --max-in-flight 3", pp, 2,
                 NULL, &err);
    check(c, ok && o.schedule == SCHEDULE_ZB_AUTO && o.max_in_flight == 3, "zb-auto with a limit");
    ok = resolve(&o, "--train-data x --pipeline 2 --virtual 2 --schedule-file f", pp, 2, NULL,
                 &err);
    check(c, ok && strcmp(o.schedule_file, "f") == 0 && o.chunks == 2, "a schedule of one's own");
    ok = resolve(&o, "--train-data x --layers 30 --pipeline 4", pp, 4, NULL, &err);
    check(c, ok && o.config.L == 30, "\"dropped layers\": 30 layers on 4 stages stay 30");
    ok = resolve(&o, "--train-data x --order ptd --zero 0 --overlap 0", ALL, 2, NULL, &err);
    check(c, ok && strcmp(o.order, "ptd") == 0 && !o.zero && !o.overlap, "order, zero and overlap");
}

enum { RANK_ROWS = sizeof RANK_OPTIONS / sizeof *RANK_OPTIONS };
static const Field *table_row(int i) {
    return i < OPTION_ROWS ? &OPTIONS[i] : &RANK_OPTIONS[i - OPTION_ROWS];
}

// Every row of the tables has help, a range that holds its default, and a field of its own.
static void test_table(Check *c) {
    bool help = true, fields = true, defaults = true;
    for (int i = 0; i < OPTION_ROWS + RANK_ROWS; i++) {
        const Field *a = table_row(i);
        help = help && (a->type == FIELD_TITLE ? !a->initial && !a->help : strlen(a->help) > 5);
        Options o;
        defaults = defaults && (!a->initial || field_set(&o, a, a->initial));
        for (int j = 0; j < i && a->help; j++) {
            const Field *b = table_row(j);
            if (b->help && (b->offset == a->offset || strcmp(b->name, a->name) == 0))
                fields = false;
        }
    }
    check(c, help, "every flag has help");
    check(c, defaults, "every default is a value that the flag takes");
    check(c, fields, "no two flags share a name or a field");
}

// Checks --help of the trainer with these sections: width, count of flags; `has` is there and
// `lacks` is not.
static void test_help(Check *c, unsigned sections, bool all, size_t most, const char *has,
                      const char *lacks) {
    char *text = NULL;
    size_t size = 0, widest = 0, flags = 0;
    FILE *file = open_memstream(&text, &size);
    Options o;
    Error err;
    if (!file || !parse(&o, "", sections, &err)) return;
    options_help(file, "build/train_gpt", &o, all);
    fclose(file);
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        if (strcspn(line, "\n") > widest) widest = strcspn(line, "\n");
        flags += strncmp(line, "  --", 4) == 0;
    }
    check(c, strstr(text, has) && !strstr(text, lacks), "help has %s and not %s", has, lacks);
    check(c, widest <= 110 && flags <= most,
          "help is %zu columns wide and has %zu flags, at most %zu", widest, flags, most);
    free(text);
}

// The rows of a lesson stand beside those of every trainer.
static void test_own(Check *c) {
    struct { size_t experts; double capacity; } own;
    const Field rows[] = {{"experts", FIELD_SIZE, 0, "8", 1, 128, 0, "N", "experts of a layer"},
                          {"capacity", FIELD_REAL, sizeof(size_t), "1.25", 1e-3, 1e3,
                           OPTION_BASIC, "X", "of experts"}};
    const FieldTable table = {rows, 2, &own};
    char *words[] = {(char *)"train_moe", (char *)"--experts", (char *)"4", (char *)"--layers",
                     (char *)"3"},
         *text;
    char *wrong[] = {(char *)"train_moe", (char *)"--capacity", (char *)"0"};
    Options o;
    Error err;
    bool ok = options_parse(&o, &table, 5, words, one_rank_options(), &err);
    check(c, ok && own.experts == 4 && own.capacity == 1.25 && o.config.L == 3,
          "a lesson's flags and their defaults");
    ok = !options_parse(&o, &table, 3, wrong, one_rank_options(), &err);
    check(c, ok && strstr(err.text, "--capacity must be a number from 0.001"), "out of range: %s",
          err.text);
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) return;
    options_help(file, "train_moe", &o, false);
    fclose(file);
    check(c, strstr(text, "  --capacity X") && !strstr(text, "  --experts"),
          "help has a lesson's flags at its end");
    free(text);
}

int main(void) {
    static Check c;
    test_own(&c);
    test_defaults(&c);
    test_model(&c);
    test_grid(&c);
    test_table(&c);
    test_help(&c, 0, false, 24, "--train-data GLOB", "--beta1");
    test_help(&c, ALL, false, 32, "--schedule gpipe|", "--order");
    test_help(&c, 0, true, 99, "(default 1e-3)", "--tensor ");
    test_help(&c, ALL, true, 99, "--help [all]", "--tensorial");
    test_refusals(&c);
    return check_summary(&c);
}
