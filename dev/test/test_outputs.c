// test_outputs.c: llmc/host/outputs.h: a run overwrites nothing but former outputs.
#define _GNU_SOURCE
#include "llmc/host/dataloader.h"
#include "llmc/host/outputs.h"

#include "dev/test/check.h"
#include "dev/test/files.h"

static size_t count_entries(void) {
    size_t n = 0;
    DIR *here = opendir(".");
    while (here && readdir(here)) n++;
    if (here) closedir(here);
    return n;
}

// Parses `line` (words and spaces) as a trainer would, and checks its outputs.
static bool outputs_are_fine(const char *line, Error *err) {
    char copy[512], *words[32] = {"train_gpt"}, *rest = copy;
    int n = 1;
    snprintf(copy, sizeof copy,
             "--train-data train.bin --val-data val_*.bin --tokenizer tokenizer.json %s", line);
    for (char *word; (word = strtok_r(rest, " ", &rest));) words[n++] = word;
    Options o;
    if (!options_parse(&o, NULL, n, words, (RankOptions){NULL, 0, 0, NULL, NULL}, err))
        die(line, err->text);
    return outputs_check(&o, err);
}

#define SIXTEEN "xxxxxxxxxxxxxxxx"  // 246 characters leave no room for ".unfinished"
#define LONG                                                                                \
    SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN SIXTEEN \
        SIXTEEN SIXTEEN SIXTEEN SIXTEEN "xxxxxx"

typedef struct {
    const char *flags, *says;  // NULL: they are fine
} OutputCase;

static const OutputCase CASES[] = {
    {"", NULL},
    {"--log new.jsonl --trace new.json --dump-gradients new.safetensors", NULL},
    {"--log old.jsonl --trace old.json --dump-gradients old.safetensors", NULL},
    {"--trace empty", NULL},
    {"--trace text", "--trace would overwrite text, which is no former output of it"},
    {"--dump-gradients text", "--dump-gradients would overwrite text, which is no former output"},
    {"--dump-gradients other/model.safetensors", "which is no former output"},
    {"--dump-gradients g",
     "--dump-gradients would overwrite g.unfinished, which is no former output"},
    {"--dump-gradients h", "cannot open h.unfinished: Is a directory"},
    {"--dump-gradients " LONG, "File name too long"},
    {"--log train.bin", "--log would overwrite train.bin, which is no former output"},
    {"--trace val_1.bin", "--trace would overwrite val_1.bin, which is no former output"},
    {"--dump-gradients ./val_0.bin", "--dump-gradients would overwrite ./val_0.bin"},
    {"--trace link_to_train", "--trace would overwrite link_to_train"},
    {"--trace hard_link_to_train", "--trace would overwrite hard_link_to_train"},
    {"--log tokenizer.json", "--log would overwrite tokenizer.json"},
    {"--trace model/config.json", "--trace would overwrite model/config.json"},
    {"--dump-gradients model/model.safetensors",
     "--dump-gradients would overwrite model/model.safetensors"},
    {"--log text", "--log would overwrite text"},
    {"--log same --trace same", "--log and --trace are both same"},
    {"--trace empty --dump-gradients ./empty", "--trace and --dump-gradients are both ./empty"},
    {"--log link_to_old", NULL},
    {"--dump-gradients link_to_old",
     "--dump-gradients would overwrite link_to_old, which is no former output"},
    {"--log fifo", "cannot open fifo: not a regular file"},
    {"--trace fifo", "cannot open fifo: not a regular file"},
    {"--log socket", "cannot open socket: No such device or address"},
    {"--log /dev/null", "cannot open /dev/null: not a regular file"},
    {"--dump-gradients fifo", "cannot open fifo: not a regular file"},
    {"--dump-gradients /dev/null", "cannot open /dev/null: not a regular file"},
    {"--trace model", "cannot open model: Is a directory"},
    {"--trace no/such/folder", "cannot open no/such/folder: No such file or directory"},
};

int main(void) {
    static Check c;
    static char folder[] = "build/test_outputs.XXXXXX";
    static const int32_t shard[256 + 32] = {SHARD_MAGIC, SHARD_VERSION, 64};  // and 64 tokens
    static const char *const files[] = {"tokenizer.json", "text", "model/config.json",
                                        "model/model.safetensors"};
    static const GPTConfig tiny = {1, 8, 2, 20, 128, 4, NULL};
    const char *step = "{\"step\":1,\"loss\":1}\n", *text = "{\"text\":1}";
    alarm(60);  // ends the program if a FIFO makes it wait
    if (!mkdtemp(folder) || chdir(folder) || mkdir("model", 0777) || mkdir("other", 0777) ||
        mkdir("h.unfinished", 0777)) die("cannot make", folder);
    write_file("train.bin", shard, sizeof shard);
    write_file("val_0.bin", shard, sizeof shard);
    write_file("val_1.bin", shard, sizeof shard);
    for (int i = 0; i < 4; i++) write_file(files[i], text, strlen(text));
    write_file("old.jsonl", step, strlen(step));
    write_file("empty", "", 0);
    TraceEvent event = trace_event("forward", 0, 0, 0, 0);
    const char *track = "compute";
    Error err = {""};
    if (!trace_write("old.json", &event, 1, &track, 1, &err) ||
        !slices_create("old.safetensors", GRADIENTS_START, &tiny, 0, 0, ST_F32, &err) ||
        !slices_create("other/model.safetensors", ST_START, &tiny, 0, 0, ST_F32, &err))
        die("old", err.text);
    bool made = symlink("train.bin", "link_to_train") == 0 &&
                link("train.bin", "hard_link_to_train") == 0 &&
                symlink("old.jsonl", "link_to_old") == 0 &&
                symlink("text", "g.unfinished") == 0 && mkfifo("fifo", 0666) == 0 &&
                mknod("socket", S_IFSOCK | 0666, 0) == 0;
    check(&c, made, "links, a FIFO and a socket");
    size_t before = count_entries(), bytes;
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        Error err = {""};
        bool fine = outputs_are_fine(CASES[i].flags, &err);
        bool ok = CASES[i].says ? !fine && strstr(err.text, CASES[i].says) : fine;
        check(&c, ok, "%s: %s -> %s", CASES[i].says ? "refused" : "fine", CASES[i].flags, err.text);
    }
    char *text_after = file_read("text", 100, &bytes, &err),
         *log_after = file_read("old.jsonl", 100, &bytes, &err);
    bool same = text_after && strcmp(text_after, text) == 0 && log_after &&
                strcmp(log_after, step) == 0;
    check(&c, same && count_entries() == before, "and nothing was made or touched");
    free(text_after);
    free(log_after);
    if (chdir("../..") == 0) remove_tree(folder);
    return check_summary(&c);
}
