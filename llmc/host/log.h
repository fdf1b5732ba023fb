// log.h: what a run says: one console line a step, and the JSON Lines file of --log.
//
// defines: device_peak_flops, StepReport, Log, log_check, log_open, log_step, log_validation, EvalReport, log_eval,
//          log_close
//
// A step is numbered by the updates that are done after it, as checkpoints are: the first one is step 1.
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include <ctype.h>
#include <math.h>

#include "llmc/host/file.h"

// Dense peak of a matrix product in TFLOP/s: bf16 on tensor cores, and plain fp32 (0: not known for sure).
typedef struct {
    const char *name;  // as cudaGetDeviceProperties begins or gives it
    double bf16, fp32;
} DevicePeak;

static const DevicePeak DEVICE_PEAKS[] = {  // the vendor's data sheets; the longest name that matches counts
    {"NVIDIA A10", 125, 31.2},
    {"NVIDIA A30", 165, 10.3},
    {"NVIDIA A40", 149.7, 37.4},
    {"NVIDIA A100", 312, 19.5},
    {"NVIDIA L4", 121, 30.3},
    {"NVIDIA L40S", 362, 91.6},
    {"NVIDIA H100", 989, 67},
    {"NVIDIA H100 PCIe", 756, 51},
    {"NVIDIA H100 NVL", 835, 60},
    {"NVIDIA H200", 989, 67},
    {"NVIDIA H200 NVL", 835, 60},
    {"NVIDIA GH200", 989, 67},
    {"NVIDIA B200", 2250, 0},
};

// Peak FLOP/s of a device by its name, 0 if unknown: a wrong peak would make a wrong MFU.
static inline double device_peak_flops(const char *name, bool bf16) {
    double peak = 0;
    size_t longest = 0;
    if (strstr(name, "MIG")) return 0;  // a slice of a GPU
    for (size_t i = 0; i < sizeof DEVICE_PEAKS / sizeof DEVICE_PEAKS[0]; i++) {
        size_t length = strlen(DEVICE_PEAKS[i].name);
        bool begins = strncmp(name, DEVICE_PEAKS[i].name, length) == 0;
        if (!begins || isalnum((unsigned char)name[length]) || length <= longest) continue;
        longest = length;
        peak = 1e12 * (bf16 ? DEVICE_PEAKS[i].bf16 : DEVICE_PEAKS[i].fp32);
    }
    return peak;
}

// What one step reports.
typedef struct {
    size_t step;       // updates done after it
    double loss;       // mean over all tokens of the global batch
    double grad_norm;  // before clipping
    double lr, ms;
    double tokens;     // of this step, over all ranks; 0: as many as log_open was told
} StepReport;

typedef struct {
    FILE *json;         // NULL: no --log
    size_t steps;       // of the whole run
    double tokens;      // of one step, over all ranks
    double flops;       // of one step, over all ranks
    double flops_llmc;  // the same as llm.c counts
    double peak_flops;  // of all devices together; 0: unknown
    double mean_ms;     // smoothed, for the time left
    bool virtual_time;  // times are those of a described cluster
    bool simulated;     // likewise, and nothing was computed: there is no loss
    size_t seen;        // steps logged by this process
    int failure;        // errno of the first line that could not be written; 0: none
} Log;

// Reads through a log. *end: where the lines of the first `done` steps end; a last line that was cut off is none of
// them. False if it is no log.
static inline bool log_scan(FILE *in, const char *path, size_t done, long *end, Error *err) {
    static const char start[] = "{\"step\":";
    char line[1024];
    bool later = false;
    *end = 0;
    for (size_t number = 1; fgets(line, sizeof line, in); number++) {
        unsigned long long step;
        size_t length = strlen(line);
        bool cut_off = length > 0 && line[length - 1] != '\n' && feof(in);  // 0: a line that begins with a 0 byte
        if (cut_off && strncmp(line, start, length < strlen(start) ? length : strlen(start)) == 0) break;
        if (sscanf(line, "{\"step\":%llu,", &step) != 1) {
            return error_set(err, "line %zu of %s is no line of a training log: give --log another file", number, path);
        }
        later |= step > done;
        if (!later) *end = ftell(in);
    }
    return true;
}

static inline bool log_is_file(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

// Is there no file of that name yet, or the log of a run, or a device or pipe? Touches nothing.
static inline bool log_check(const char *path, Error *err) {
    if (!log_is_file(path)) return true;
    FILE *in = fopen(path, "rb");
    long end;
    if (!in) return error_set(err, "cannot read log %s: %s", path, strerror(errno));
    bool ok = log_scan(in, path, 0, &end, err);
    fclose(in);
    return ok;
}

// Drops the lines after the first `done` steps, which the run does again; with none done, all lines.
static inline bool log_truncate(const char *path, size_t done, Error *err) {
    FILE *log = fopen(path, "r+b");
    long end;
    if (!log) return error_set(err, "cannot write log %s: %s", path, strerror(errno));
    bool ok = log_scan(log, path, done, &end, err);
    if (ok && ftruncate(fileno(log), done ? end : 0) != 0) {
        ok = error_set(err, "cannot write log %s: %s", path, strerror(errno));
    }
    fclose(log);
    return ok;
}

// Starts the report of a run of `steps` steps, of which `done` were done before a resume: later lines of the log are
// dropped. path may be NULL. tokens and flops are those of one step over all ranks, flops counted in full and as llm.c
// does (llmc/model.h); peak_flops is that of all devices together (0: unknown, MFU is "n/a").
static inline bool log_open(Log *log, const char *path, size_t done, size_t steps, double tokens, double flops,
                            double flops_llmc, double peak_flops, Error *err) {
    memset(log, 0, sizeof *log);
    log->steps = steps;
    log->tokens = tokens;
    log->flops = flops;
    log->flops_llmc = flops_llmc;
    log->peak_flops = peak_flops;
    if (!path) return true;
    if (log_is_file(path) && !log_truncate(path, done, err)) return false;
    log->json = file_open_output(path, O_APPEND, err);
    return log->json != NULL;
}

// Appends `,"name":number` with 9 significant digits; JSON knows no infinities.
static inline void log_number(FILE *json, const char *name, double number) {
    if (isfinite(number)) fprintf(json, ",\"%s\":%.9g", name, number);
    else fprintf(json, ",\"%s\":null", name);
}

static inline void log_end_line(Log *log) {
    fprintf(log->json, "}\n");
    errno = 0;
    bool written = fflush(log->json) == 0;  // so that the log of a killed run ends at its last step
    if (written || log->failure) return;
    log->failure = errno;
    fprintf(stderr, "note: the log cannot be written: %s; training goes on without it\n", strerror(errno));
}

// Writes a time as 1h02m, 3m05s or 4s.
static inline void log_duration(char *text, size_t size, double seconds) {
    unsigned long long s = (unsigned long long)(seconds + 0.5);
    if (s >= 3600) snprintf(text, size, "%lluh%02llum", s / 3600, s / 60 % 60);
    else if (s >= 60) snprintf(text, size, "%llum%02llus", s / 60, s % 60);
    else snprintf(text, size, "%llus", s);
}

// The console line of a step, and its line in the log.
static inline void log_step(Log *log, const StepReport *r) {
    double share = r->tokens > 0 ? r->tokens / log->tokens : 1.0;  // of a full step
    double tokens_per_s = share * log->tokens / (1e-3 * r->ms);
    // The first step warms up libraries and caches: it counts for the time left only until there is a second.
    log->mean_ms = log->seen < 2 ? r->ms : 0.9 * log->mean_ms + 0.1 * r->ms;
    log->seen++;
    char left[32], mfu[64], width[32];
    double to_go = log->steps > r->step ? (double)(log->steps - r->step) : 0.0;
    double of_peak = log->peak_flops > 0 ? share / (1e-3 * r->ms) / log->peak_flops : 0.0;
    double mfu_full = log->flops * of_peak, mfu_llmc = log->flops_llmc * of_peak;
    log_duration(left, sizeof left, 1e-3 * log->mean_ms * to_go);
    if (of_peak > 0) snprintf(mfu, sizeof mfu, "%.1f%% (as llm.c %.1f%%)", 100.0 * mfu_full, 100.0 * mfu_llmc);
    else snprintf(mfu, sizeof mfu, "n/a");
    int digits = snprintf(width, sizeof width, "%zu", log->steps);
    printf("step %*zu/%zu | ", digits, r->step, log->steps);
    if (!log->simulated) printf("loss %.6f | norm %.4f | lr %.3e | ", r->loss, r->grad_norm, r->lr);
    printf("%.1f ms | %.0f tokens/s | MFU %s | ", r->ms, tokens_per_s, mfu);
    if (log->virtual_time) printf("virtual time\n");
    else printf("%s left\n", left);
    fflush(stdout);
    if (!log->json) return;
    fprintf(log->json, "{\"step\":%zu", r->step);
    if (log->virtual_time) fprintf(log->json, ",\"simulated\":true");
    if (!log->simulated) {
        log_number(log->json, "loss", r->loss);
        log_number(log->json, "grad_norm", r->grad_norm);
        log_number(log->json, "lr", r->lr);
    }
    log_number(log->json, "ms", r->ms);
    log_number(log->json, "tokens_per_s", tokens_per_s);
    if (of_peak > 0) log_number(log->json, "mfu", mfu_full), log_number(log->json, "mfu_llmc", mfu_llmc);
    log_end_line(log);
}

// The validation loss after `step` updates.
static inline void log_validation(Log *log, size_t step, double val_loss) {
    printf("step %zu/%zu | validation loss %.6f\n", step, log->steps, val_loss);
    fflush(stdout);
    if (!log->json) return;
    fprintf(log->json, "{\"step\":%zu", step);
    log_number(log->json, "val_loss", val_loss);
    log_end_line(log);
}

// What --eval has found: sums over the rows of a file.
typedef struct {
    size_t rows, tokens;  // tokens: those that count
    double loss_sum;      // of these
    size_t words;         // of the original text; 0: not known
    size_t right, of;     // rows guessed whole (cloze), or examples with the right choice; of 0: neither
} EvalReport;

// Perplexities are exp(loss sum / tokens) and exp(loss sum / words), as Megatron-LM's section 5 counts them.
static inline void log_eval(Log *log, const char *path, const EvalReport *r) {
    double mean = r->loss_sum / (double)r->tokens, of_words = r->words ? r->loss_sum / (double)r->words : 0.0;
    printf("eval %s: %zu rows, %zu tokens, loss sum %.10g\n", path, r->rows, r->tokens, r->loss_sum);
    printf("eval loss per token %.6f, perplexity %.6g\n", mean, exp(mean));
    if (r->words) printf("eval %zu original words, perplexity per word %.6g\n", r->words, exp(of_words));
    if (r->of) printf("eval right %zu of %zu, accuracy %.4f\n", r->right, r->of, (double)r->right / (double)r->of);
    fflush(stdout);
    if (!log->json) return;
    fprintf(log->json, "{\"step\":0,\"eval_rows\":%zu,\"eval_tokens\":%zu", r->rows, r->tokens);
    log_number(log->json, "eval_loss_sum", r->loss_sum);
    log_number(log->json, "eval_perplexity", exp(mean));
    if (r->words) fprintf(log->json, ",\"eval_words\":%zu", r->words);
    if (r->words) log_number(log->json, "eval_word_perplexity", exp(of_words));
    if (r->of) fprintf(log->json, ",\"eval_right\":%zu,\"eval_of\":%zu", r->right, r->of);
    log_end_line(log);
}

// False, with a sentence, if something could not be written (a full disk).
static inline bool log_close(Log *log, Error *err) {
    errno = 0;
    if (log->json && fclose(log->json) != 0 && !log->failure) log->failure = errno;
    log->json = NULL;
    return log->failure ? error_set(err, "the log is incomplete: %s", strerror(log->failure)) : true;
}

#endif
