// moe_log.h: the lines of --log about the tokens of a step on the experts.
// lesson: moe
//
// defines: moe_log
#ifndef LLMC_MOE_LOG_H
#define LLMC_MOE_LOG_H

#include "llmc/host/log.h"

// Adds a line for each of L layers to the log. sums (L, 4, E) are over a step of `tokens`
// tokens. For each expert:
//   0  How many choices fell on it.
//   1  How many of these were dropped.
//   2  Its share of the balance loss. The E shares add up to 1 if experts are chosen alike.
//   3  Its share of the loss of large logits.
static inline void moe_log(Log *log, size_t step, const double *sums, size_t L, size_t E,
                           double tokens) {
    for (size_t l = 0; l < L; l++, sums += 4 * E) {
        double dropped = 0, balance = 0, z = 0;
        for (size_t e = 0; e < E; e++) {
            dropped += sums[E + e];
            balance += sums[2 * E + e];
            z += sums[3 * E + e];
        }
        fprintf(log->json, "{\"step\":%zu,\"layer\":%zu,\"dropped\":%.0f", step, l,
                dropped);
        log_number(log->json, "balance", balance / tokens);
        log_number(log->json, "z", z / tokens);
        for (size_t e = 0; e < E; e++)
            fprintf(log->json, "%s%.0f", e ? "," : ",\"tokens\":[", sums[e]);
        fprintf(log->json, "]");
        log_end_line(log);
    }
}

#endif
