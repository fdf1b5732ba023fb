// st_index.h: weights that are split into several safetensors files, as Hugging Face saves large models:
// model.safetensors.index.json says which file of its folder each tensor is in.
//
// defines: st_open_index
#ifndef LLMC_ST_INDEX_H
#define LLMC_ST_INDEX_H

#include "llmc/host/safetensors.h"

enum { ST_MAX_PARTS = 1000 };

// A name in the index's own folder: no way out of it.
static inline bool st_index_name_is_plain(const char *name) {
    return st_name_is_plain(name) && !strchr(name, '/') && name[0] != '.';
}

// Takes over the file of an open part, with its tensors.
static inline void st_index_add(SafeTensors *st, SafeTensors *part) {
    st->entries = (STEntry *)host_resize(st->entries, st->count + part->count, sizeof(STEntry));
    st->parts = (int *)host_resize(st->parts, st->part_count + 1, sizeof(int));
    st->parts[st->part_count++] = part->fd;
    part->fd = -1;
    for (size_t i = 0; i < part->count; i++) {
        part->entries[i].part = st->part_count;
        st->entries[st->count++] = part->entries[i];
    }
}

// Opens each file that the index names; files[k] becomes the name of the k-th.
static inline bool st_index_open(SafeTensors *st, const char *dir, const cJSON *map, const char **files, Error *err) {
    const cJSON *item;
    size_t listed = 0;
    cJSON_ArrayForEach(item, map) {
        if (!cJSON_IsString(item) || !st_index_name_is_plain(item->valuestring) || !st_name_is_plain(item->string)) {
            return error_set(err, "%s: entry %zu of its \"weight_map\" is no tensor with a file of this folder",
                             st->path, listed);
        }
        listed++;
    }
    cJSON_ArrayForEach(item, map) {
        char path[PATH_MAX];
        SafeTensors part;
        size_t k = 0;
        while (k < st->part_count && strcmp(files[k], item->valuestring) != 0) k++;
        if (k < st->part_count) continue;
        if (k == ST_MAX_PARTS) return error_set(err, "%s names more than %d files", st->path, (int)ST_MAX_PARTS);
        if (!path_print(path, sizeof path, err, "%s/%s", dir, item->valuestring)) return false;
        if (access(path, F_OK) != 0) {
            return error_set(err, "%s lies: it puts tensor %s into %s, which is not there", st->path, item->string,
                             path);
        }
        if (!st_open(&part, path, err)) return false;
        st_index_add(st, &part);
        st_close(&part);
        files[k] = item->valuestring;
    }
    return true;
}

// Does the index list each tensor of its files once, where it is? seen[st->count]: 0.
static inline bool st_index_compare(const SafeTensors *st, const cJSON *map, const char **files, bool *seen,
                                    Error *err) {
    const cJSON *item, *missing = NULL;
    for (size_t i = 1; i < st->count; i++) {
        const STEntry *x = &st->entries[i - 1], *y = &st->entries[i];
        if (strcmp(x->name, y->name) == 0) {
            return error_set(err, "%s lies: %s and %s both have tensor %s", st->path, files[x->part - 1],
                             files[y->part - 1], x->name);
        }
    }
    cJSON_ArrayForEach(item, map) {
        const STEntry *x = st_find(st, item->string);
        if (!x || strcmp(x->name, item->string) != 0) {
            missing = item;
            continue;
        }
        if (strcmp(files[x->part - 1], item->valuestring) != 0) {
            return error_set(err, "%s lies: it puts tensor %s into %s, but %s has it", st->path, x->name,
                             item->valuestring, files[x->part - 1]);
        }
        if (seen[x - st->entries]) return error_set(err, "%s lies: it lists tensor %s twice", st->path, x->name);
        seen[x - st->entries] = true;
    }
    for (size_t i = 0; i < st->count; i++) {
        const STEntry *x = &st->entries[i];
        if (!seen[i]) return error_set(err, "%s lies: %s has tensor %s, which it does not list", st->path,
                                       files[x->part - 1], x->name);
    }
    return !missing || error_set(err, "%s lies: it puts tensor %s into %s, which has it not", st->path,
                                 missing->string, missing->valuestring);
}

static inline bool st_index_read(SafeTensors *st, const char *dir, const cJSON *root, Error *err) {
    const cJSON *map;
    if (!json_get(root, "weight_map", &map, st->path, err)) return false;
    if (!cJSON_IsObject(map) || !map->child) return error_set(err, "%s has no \"weight_map\"", st->path);
    const char **files = (const char **)host_alloc(ST_MAX_PARTS, sizeof *files);
    bool ok = st_index_open(st, dir, map, files, err);
    if (ok) {
        bool *seen = (bool *)host_alloc(st->count, sizeof *seen);
        qsort(st->entries, st->count, sizeof(STEntry), st_compare_names);
        ok = st_index_compare(st, map, files, seen, err);
        free(seen);
    }
    free(files);
    return ok;
}

// Opens all files of an index to read from, as if they were one. False with a sentence, and nothing to close, if the
// index and the files do not agree on every tensor.
static inline bool st_open_index(SafeTensors *st, const char *dir, const char *index, Error *err) {
    memset(st, 0, sizeof *st);
    st->fd = -1;
    cJSON *root = json_read(index, ST_MAX_HEADER, err);
    if (!root) return false;
    st->path = host_string(index);
    bool ok = st_index_read(st, dir, root, err);
    cJSON_Delete(root);
    if (!ok) st_close(st);
    return ok;
}

#endif
