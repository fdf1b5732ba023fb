// scale.c: predicts the step time of every published run in a table and compares.
//
//   scale [--set KEY=VALUE]... [--fit KEY,KEY] [--parts] [--csv FILE] [--trainers FOLDER]
//   ROWS.csv...
//         CLUSTER.json:PREFIX,...
//
// A row belongs to the cluster whose prefix its id begins with. The light simulation of step.h
// predicts it. A row without a full layout is only reported.
//
//   --fit       Seeks the values of the named constants with the least mean absolute error. It does
//               not see the rows that are held out: every third row of a group, the first included,
//               every second one of MPT's and vTrain's, and all of some groups.
//   --csv       Writes the predictions to a file.
//   --set       Tries a value.
//   --parts     Shows the parts of the time.
//   --trainers  Has the trainers in a folder simulate each row that their flags can say. Compares
//               it with the light simulation of the same software: see trainer.h.
#include "dev/plot/tool.h"
#include "dev/scale/rows.h"
#include "dev/scale/step.h"
#include "dev/scale/trainer.h"

// Mean absolute error (%) of Calculon (Isaev et al., SC23), as shipped, on the same rows; below
// 0: not known. All rows of a group without a goal, or unseen, are held out: no constant was
// changed for it.
typedef struct {
    const char *prefix, *title;
    double goal, calculon;
    bool unseen;
} Group;

static const Group groups[] = {
    {"ptd-t1-", "PTD-P Table 1", 5, 10.3, false},
    {"ptd-f11-", "figure 11, pipeline weak scaling", 5, 19.4, false},
    {"ptd-f12-", "figure 12, interleaving", 5, 7.3, false},
    {"ptd-f14-", "figure 14, pipeline against data", 8, 21.7, false},
    {"ptd-f16-", "figure 16, micro-batch size", 5, 11.6, false},
    {"ptd-f17-", "figure 17, recomputation", 5, 6.4, false},
    {"ptd-f18-", "figure 18, without scatter/gather", 8, 15.6, false},
    {"kor-t5-", "Korthikanti Table 5", 5, 3.7, false},
    {"zb-", "Zero Bubble", 8, -1, false},
    {"ptd-t2-", "PTD-P Table 2, v = 1 assumed", -1, -1, false},
    {"mlm2020-", "Megatron-LM 2020, A100-40GB", -1, -1, false},
    {"nemo2208-175b", "NeMo 2022, 175B", -1, -1, false},
    {"nemo2208-5b", "NeMo 2022, 5B, August", -1, -1, false},
    {"nemo2211-5b", "NeMo 2022, 5B, December", -1, -1, false},
    {"mtnlg-", "MT-NLG 530B, DeepSpeed", -1, -1, false},
    {"llmc-", "llm.c, 8 A100 or H100", -1, -1, false},
    {"vts-", "vTrain, one node", 10, -1, false},
    {"bloom-", "BLOOM, Megatron-DeepSpeed", 9, -1, true},
    {"mpt-a100-80-", "MPT under FSDP, A100-80GB", 8, -1, false},
    {"mpt-a100-40-", "MPT under FSDP, A100-40GB", 8, -1, false},
    {"mpt-h100-", "MPT under FSDP, H100", 8, -1, false},
    {"eos2411-", "NeMo 2024, 175B, H100", -1, -1, false},
    {"eos2504-", "NeMo 2025, 175B, H100", -1, -1, false},
    {"dgxc-nemotron4-15b-", "Nemotron-4 15B, H100", 4, -1, true},
    {"dgxc-nemotron4-340b-", "Nemotron-4 340B, H100", 4, -1, true},
};
enum { GROUPS = sizeof groups / sizeof groups[0] };

static size_t group_of(const char *id) {
    size_t g = 0;
    while (g < GROUPS && strncmp(id, groups[g].prefix, strlen(groups[g].prefix)) != 0) g++;
    return g;
}

typedef struct {
    const Row *row;
    const Cluster *cluster;
    const char *cluster_file;
    size_t group;
    bool held_out;
    StepTime time;
    double error;          // predicted / published - 1
    double trainer, light;  // s of the trainer's own simulation, 0 if it made none; of step.h
                            // with its software
    bool published;        // the run had the trainers' software
} Point;

static int fail(const char *text) {
    fprintf(stderr, "scale: %s\n", text);
    return 2;
}

static bool wanted(const char *id, const char *prefixes) {
    for (const char *at = prefixes; *at;) {
        size_t n = strcspn(at, ",");
        if (n > 0 && strncmp(id, at, n) == 0) return true;
        at += n + (at[n] == ',');
    }
    return false;
}

// Predicts all points; the sum of absolute errors over those that are, or are not, held out.
static double predict(Point *points, size_t count, bool held_out, Error *err) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        Point *x = &points[i];
        if (x->held_out != held_out) continue;
        if (!step_simulate(x->cluster, &x->row->run, &x->time, err))
            return -1;  // choose() asked step_check
        x->error = x->time.seconds / x->row->seconds - 1;
        sum += fabs(x->error);
    }
    return sum;
}

// Returns the seconds by a model of one parameter, 158.5 TFLOP/s of each A100. It has FLOPs with
// recomputation (PTD-P, section 5.1), and the pipeline's bubble. 0 on other devices.
static double trivial_seconds(const Point *x) {
    const StepLayout *r = &x->row->run;
    if (x->cluster->sms != 108) return 0;
    double B = (double)r->global_batch, s = (double)r->T, l = (double)r->layers, h = (double)r->C;
    double V = (double)r->vocabulary, times = r->recompute == LAYER_WHOLE ? 4 : 3;
    double flops = 24 * times * B * s * l * h * h * (1 + s / (6 * h)) + 6 * B * s * h * V;
    if (r->recompute == LAYER_ATTENTION) flops += 4 * B * s * s * l * h;
    double micro_batches = B / (double)(r->micro_batch * r->d);
    return flops / ((double)r->ranks * 158.5e12) *
           (1 + (double)(r->p - 1) / ((double)r->v * micro_batches));
}

// Returns the error that --fit minimises: the mean over the groups of the mean absolute error of
// the rows that it may see.
static double fit_error(Point *points, size_t count, Error *err) {
    double sums[GROUPS + 1] = {0}, total = 0;
    size_t counts[GROUPS + 1] = {0}, used = 0;
    if (predict(points, count, false, err) < 0) return -1;
    for (size_t i = 0; i < count; i++) {
        if (points[i].held_out) continue;
        sums[points[i].group] += fabs(points[i].error);
        counts[points[i].group]++;
    }
    for (size_t g = 0; g <= GROUPS; g++) {
        if (!counts[g]) continue;
        total += sums[g] / (double)counts[g];
        used++;
    }
    return total / (double)used;
}

enum { CLUSTERS_MAX = 32 };
typedef struct {
    Cluster cluster[CLUSTERS_MAX];
    const char *prefixes[CLUSTERS_MAX];
    char paths[CLUSTERS_MAX][4096];
    size_t count;
} Clusters;

// Returns the constant of that name in a cluster, NULL if there is none or it is no number.
static double *constant(Cluster *c, const char *key, size_t length) {
    for (size_t i = 0; i < CLUSTER_FIELD_COUNT; i++) {
        const Field *f = &CLUSTER_FIELDS[i];
        if (strlen(f->name) == length && strncmp(f->name, key, length) == 0 &&
            f->type != FIELD_SWITCH && f->type != FIELD_CHOICE)
            return (double *)((char *)c + f->offset);
    }
    return NULL;
}

static void scale_constant(Clusters *all, const char *key, size_t length, double factor) {
    for (size_t i = 0; i < all->count; i++) *constant(&all->cluster[i], key, length) *= factor;
}

// Shares of something end at 1; all that --fit may be asked for are below 1 or above 2.
static bool beyond(Clusters *all, const char *key, size_t length, double before) {
    double now = *constant(&all->cluster[0], key, length);
    return before <= 1 && now > 1;
}

// Fits by coordinate descent, by factors that shrink from 10% to 0.1%, the same for all clusters.
static bool fit(Clusters *all, const char *keys, Point *points, size_t count, Error *err) {
    double best = fit_error(points, count, err);
    for (double step = 0.1; best >= 0 && step > 0.001;) {
        bool better = false;
        for (const char *at = keys; *at;) {
            size_t n = strcspn(at, ",");
            double factors[2] = {1 + step, 1 / (1 + step)};
            if (!constant(&all->cluster[0], at, n))
                return error_set(err, "no constant %.*s", (int)n, at);
            for (int i = 0; i < 2; i++) {
                double before = *constant(&all->cluster[0], at, n);
                scale_constant(all, at, n, factors[i]);
                double now = fit_error(points, count, err);
                if (now >= 0 && now < best && !beyond(all, at, n, before))
                    best = now, better = true;
                else scale_constant(all, at, n, 1 / factors[i]);
            }
            at += n + (at[n] == ',');
        }
        if (!better) step /= 2;
    }
    for (const char *at = keys; best >= 0 && *at;) {
        size_t n = strcspn(at, ",");
        printf("fitted %.*s = %.6g\n", (int)n, at, *constant(&all->cluster[0], at, n));
        at += n + (at[n] == ',');
    }
    return best >= 0;
}

static bool set(Clusters *all, const char *text, Error *err) {
    size_t n = strcspn(text, "=");
    char *end;
    for (size_t i = 0; i < all->count; i++) {
        double *value = constant(&all->cluster[i], text, n);
        if (!value || !text[n])
            return error_set(err, "--set %s: no such constant, or no value", text);
        *value = strtod(text + n + 1, &end);
        if (*end || end == text + n + 1) return error_set(err, "--set %s: no number", text);
    }
    return true;
}

// Opens the cluster of CLUSTER.json:PREFIX,PREFIX.
static bool open_cluster(Clusters *all, const char *text, Error *err) {
    const char *colon = strrchr(text, ':');
    if (!colon || all->count == CLUSTERS_MAX)
        return error_set(err, "%s is not CLUSTER.json:PREFIX,...", text);
    char *path = all->paths[all->count];
    snprintf(path, sizeof all->paths[0], "%.*s", (int)(colon - text), text);
    all->prefixes[all->count] = colon + 1;
    return cluster_read(&all->cluster[all->count++], path, err);
}

// Prints the constants whose source says that they were fitted or chosen, rather than taken from
// elsewhere.
static void print_fitted(const Clusters *all) {
    Error err;
    for (size_t i = 0; i < all->count; i++) {
        cJSON *root = json_read(all->paths[i], CLUSTER_FILE_MAX, &err);
        printf("\n%s, fitted or chosen:\n", all->cluster[i].name);
        for (size_t k = 0; root && k < CLUSTER_FIELD_COUNT; k++) {
            const Field *f = &CLUSTER_FIELDS[k];
            const cJSON *section =
                cJSON_GetObjectItem(root, f->tags & CLUSTER_SOFTWARE ? "software" : "hardware");
            const cJSON *constant = cJSON_GetObjectItem(section, f->name);
            const char *source = cJSON_GetStringValue(cJSON_GetObjectItem(constant, "source"));
            bool ours = source &&
                        (strncmp(source, "fitted", 6) == 0 || strncmp(source, "chosen", 6) == 0);
            for (size_t j = 0; ours && j < i; j++)  // named already
                ours = memcmp((const char *)&all->cluster[i] + f->offset,
                              (const char *)&all->cluster[j] + f->offset, sizeof(double)) != 0;
            if (ours) printf("  %s = %g: %s\n", f->name, cJSON_GetNumberValue(
                                 cJSON_GetObjectItem(constant, "value")), source);
        }
        cJSON_Delete(root);
    }
}

// Makes the points of the table: each row with the first cluster that names it.
static size_t choose(const Clusters *all, Row *rows, size_t row_count, Point *points) {
    size_t count = 0, seen[GROUPS + 1] = {0};
    for (size_t i = 0; i < row_count; i++) {
        size_t k = 0, g = group_of(rows[i].id);
        while (k < all->count && !wanted(rows[i].id, all->prefixes[k])) k++;
        if (k == all->count) continue;
        Error err;
        if (rows[i].bad || !step_check(&rows[i].run, &err)) {
            fprintf(stderr, "scale: %s is left out: %s\n", rows[i].id,
                    rows[i].bad ? rows[i].why : err.text);
            continue;
        }
        Point *x = &points[count++];
        x->row = &rows[i];
        x->cluster = &all->cluster[k];
        x->cluster_file = all->paths[k];
        x->group = g;
        size_t number = seen[g]++;
        bool half = g < GROUPS &&
                    (strncmp(groups[g].prefix, "mpt-", 4) == 0 || groups[g].prefix[0] == 'v');
        bool unseen = g < GROUPS && (groups[g].goal < 0 || groups[g].unseen);
        x->held_out = half ? number % 2 == 1 : unseen || number % 3 == 0;
    }
    return count;
}

static void print_rows(const Point *points, size_t count, bool parts) {
    printf("%-24s %10s %10s %8s\n", "run", "predicted", "published", "error");
    for (size_t i = 0; i < count; i++) {
        const Point *x = &points[i];
        printf("%-24s %8.3f s %8.3f s %+6.1f %% %s", x->row->id, x->time.seconds, x->row->seconds,
               100 * x->error, x->held_out ? "held out" : "        ");
        for (int part = 0; parts && part < TIME_PARTS; part++)
            printf(" %s %.1f%%", time_part_name((TimePart)part),
                   100 * x->time.parts[part] / x->time.seconds);
        printf("\n");
    }
}

// Writes the predictions as CSV.
static bool write_csv(const char *path, const Point *points, size_t count, Error *err) {
    FILE *file = fopen(path, "w");
    if (!file) return error_set(err, "cannot write %s: %s", path, strerror(errno));
    fprintf(file, "id,cluster,held_out,predicted_s,published_s,error_percent");
    for (int part = 0; part < TIME_PARTS; part++)
        fprintf(file, ",%s_s", time_part_name((TimePart)part));
    for (size_t i = 0; i < count; i++) {
        const Point *x = &points[i];
        fprintf(file, "\n\"");
        for (const char *at = x->row->id; *at; at++) fprintf(file, *at == '"' ? "\"\"" : "%c", *at);
        fprintf(file, "\",%s,%d,%.6g,%.6g,%.2f", x->cluster->name, x->held_out, x->time.seconds,
                x->row->seconds, 100 * x->error);
        for (int part = 0; part < TIME_PARTS; part++) fprintf(file, ",%.4g", x->time.parts[part]);
    }
    fprintf(file, "\n");
    bool ok = ferror(file) == 0;
    return (fclose(file) == 0 && ok) ||
           error_set(err, "cannot write %s: %s", path, strerror(errno));
}

// Prints a group's errors over all rows, and over those that are held out.
static void print_groups(const Point *points, size_t count) {
    printf("\n%-34s %4s %7s %9s %7s %7s %9s %8s %6s\n", "mean absolute error, %", "rows", "ours",
           "held out", "bias", "worst", "Calculon", "trivial", "goal");
    for (size_t g = 0; g < GROUPS; g++) {
        double sum = 0, held_sum = 0, bias = 0, worst = 0, trivial = 0;
        size_t n = 0, held_n = 0;
        for (size_t i = 0; i < count; i++) {
            const Point *x = &points[i];
            if (x->group != g) continue;
            n++, sum += fabs(x->error), bias += x->error;
            trivial = trivial_seconds(x) > 0
                          ? trivial + fabs(trivial_seconds(x) / x->row->seconds - 1)
                          : -INFINITY;
            if (x->held_out) held_n++, held_sum += fabs(x->error);
            if (fabs(x->error) > fabs(worst)) worst = x->error;
        }
        if (!n) continue;
        printf("%-34s %4zu %7.1f %9.1f %+7.1f %+7.1f", groups[g].title, n, 100 * sum / (double)n,
               held_n ? 100 * held_sum / (double)held_n : 0.0, 100 * bias / (double)n, 100 * worst);
        double known[3] = {groups[g].calculon, 100 * trivial / (double)n, groups[g].goal};
        for (int i = 0; i < 3; i++) {
            if (known[i] < 0) printf(" %*s", 9 - i - (i == 2), "-");
            else printf(" %*.1f", 9 - i - (i == 2), known[i]);
        }
        printf("\n");
    }
}

// Prints the errors by the size of the job: the factor that a prediction needs for stragglers,
// contention and all else that grows with it. From the group's 10th to its 90th percentile, over
// the groups that have the predicted software.
static int compare_errors(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_bands(const Point *points, size_t count) {
    static const size_t most[] = {8, 64, 256, 1024, 4096};
    double *errors = (double *)host_alloc(count, sizeof *errors);
    printf("%-34s %4s %7s %7s %7s\n", "published over predicted, %", "rows", "low", "middle",
           "high");
    for (size_t k = 0; k < sizeof most / sizeof *most; k++) {
        size_t n = 0;
        for (size_t i = 0; i < count; i++) {
            size_t gpus = points[i].row->run.ranks;
            if (gpus <= most[k] && (k == 0 || gpus > most[k - 1]))
                errors[n++] = 1 / (1 + points[i].error) - 1;
        }
        if (!n) continue;
        qsort(errors, n, sizeof *errors, compare_errors);
        printf("up to %4zu GPUs %19s %4zu %+7.1f %+7.1f %+7.1f\n", most[k], "", n,
               100 * errors[n / 10], 100 * errors[n / 2], 100 * errors[n - 1 - n / 10]);
    }
    free(errors);
}

// Prints by how much the trainer and the light simulation differ in each group, and the trainer's
// error where the published runs had its software. The last line is of all rows.
static void print_differences(const Point *points, size_t count) {
    double all = 0, all_most = 0;
    size_t all_n = 0;
    printf("\n%-34s %4s %8s %8s %8s\n", "trainer and light simulation, %", "rows", "differ",
           "at most", "error");
    for (size_t g = 0; g < GROUPS; g++) {
        double sum = 0, most = 0, error = 0;
        size_t n = 0, published = 0;
        for (size_t i = 0; i < count; i++) {
            const Point *x = &points[i];
            if (x->group != g || x->trainer <= 0) continue;
            double differs = fabs(x->trainer / x->light - 1);
            n++, sum += differs, most = fmax(most, differs);
            if (x->published) published++, error += fabs(x->trainer / x->row->seconds - 1);
        }
        if (!n) continue;
        printf("%-34s %4zu %8.1f %8.1f", groups[g].title, n, 100 * sum / (double)n, 100 * most);
        if (published) printf(" %8.1f\n", 100 * error / (double)published);
        else printf(" %8s\n", "-");
        all += sum, all_most = fmax(all_most, most), all_n += n;
    }
    printf("\n%zu rows differ by %.1f %% on average, %.1f %% at most\n", all_n,
           100 * all / (double)all_n, 100 * all_most);
}

// Has the trainer simulate the rows that it can run, and the light simulation the same with the
// trainers' software.
static bool compare_trainer(Point *points, size_t count, const char *folder, Error *err) {
    size_t n = 0;
    printf("%-24s %12s %12s %10s\n", "run", "light", "trainer", "differs by");
    for (size_t i = 0; i < count; i++) {
        Point *x = &points[i];
        const StepLayout *r = &x->row->run;
        Cluster software = trainer_software(x->cluster);
        StepTime time;
        if (!trainer_can(r)) continue;
        if (!trainer_seconds(folder, x->cluster_file, r, software.data_overlap, &x->trainer, err) ||
            !step_simulate(&software, r, &time, err)) {
            printf("%-24s %s\n", x->row->id, err->text);
            x->trainer = 0;
            continue;
        }
        x->light = time.seconds;
        x->published = x->light == x->time.seconds;
        printf("%-24s %10.3f s %10.3f s %+8.1f %%\n", x->row->id, x->light, x->trainer,
               100 * (x->trainer / x->light - 1));
        fflush(stdout);
        n++;
    }
    if (n == 0) return error_set(err, "the trainers can run none of these rows");
    print_differences(points, count);
    return true;
}

int main(int argc, char **argv) {
    static Clusters all;
    Error err;
    const char *keys = NULL, *folder = NULL, *csv = NULL, *sets[64];
    size_t set_count = 0, row_count = 0;
    Row *rows = NULL;
    bool parts = false, ok = true;
    static const char usage[] =
        "usage: scale [--set KEY=VALUE]... [--fit KEY,KEY] [--parts] [--csv FILE] "
        "[--trainers FOLDER] ROWS.csv... CLUSTER.json:PREFIX,...\n";
    tool_begin(argc, argv, usage);
    for (int i = 1; ok && i < argc; i++) {
        if (strcmp(argv[i], "--parts") == 0) parts = true;
        else if (strcmp(argv[i], "--fit") == 0 && i + 1 < argc) keys = argv[++i];
        else if (strcmp(argv[i], "--set") == 0 && i + 1 < argc && set_count < 64)
            sets[set_count++] = argv[++i];
        else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc) csv = argv[++i];
        else if (strcmp(argv[i], "--trainers") == 0 && i + 1 < argc) folder = argv[++i];
        else if (argv[i][0] == '-') ok = error_set(&err, "unknown flag %s", argv[i]);
        else if (strchr(argv[i], ':')) ok = open_cluster(&all, argv[i], &err);
        else ok = rows_read(argv[i], &rows, &row_count, &err);
    }
    if (!ok) return fail(err.text);
    if (all.count == 0 || !rows)
        return fputs(usage, stderr), 2;
    for (size_t i = 0; i < set_count; i++)
        if (!set(&all, sets[i], &err)) return fail(err.text);
    Point *points = (Point *)host_alloc(row_count, sizeof *points);
    size_t count = choose(&all, rows, row_count, points);
    if (count == 0) return fail("no row with a full layout has one of these prefixes");
    ok = !keys || fit(&all, keys, points, count, &err);
    ok = ok && predict(points, count, false, &err) >= 0 && predict(points, count, true, &err) >= 0;
    if (ok && folder) ok = compare_trainer(points, count, folder, &err);
    else if (ok) {
        print_rows(points, count, parts);
        print_groups(points, count);
        printf("\n");
        print_bands(points, count);
        print_fitted(&all);
        ok = !csv || write_csv(csv, points, count, &err);
    }
    free(points);
    free(rows);
    return ok ? 0 : fail(err.text);
}
