// st_index.h: weights that are split into several safetensors files, as Hugging Face saves large models:
// model.safetensors.index.json says which file of its folder each tensor is in.
//
// defines: st_open_index
#ifndef LLMC_ST_INDEX_H
#define LLMC_ST_INDEX_H

#include "llmc/host/folder.h"
#include "llmc/host/safetensors.h"

// A name in the index's own folder: no way out of it.
static inline bool st_index_name_is_plain(const char *name) {
    return st_name_is_plain(name) && !strchr(name, '/') && name[0] != '.';
}

// Takes over the file of an open part, with its tensors, all of which the index must put there.
static inline bool st_index_add(SafeTensors *st, SafeTensors *part, const cJSON *map, const char *name, Error *err) {
    st->entries = (STEntry *)host_resize(st->entries, st->count + part->count, sizeof(STEntry));
    st->parts = (int *)host_resize(st->parts, st->part_count + 1, sizeof(int));
    for (size_t i = 0; i < part->count; i++) {
        STEntry *x = &part->entries[i];
        const cJSON *listed = cJSON_GetObjectItemCaseSensitive(map, x->name);
        if (!cJSON_IsString(listed)) {
            return error_set(err, "%s lies: %s has tensor %s, which it does not list", st->path, part->path, x->name);
        }
        if (strcmp(listed->valuestring, name) != 0) {
            return error_set(err, "%s lies: it puts tensor %s into %s, but %s has it", st->path, x->name,
                             listed->valuestring, part->path);
        }
        x->part = st->part_count + 1;
        st->entries[st->count++] = *x;
    }
    st->parts[st->part_count++] = part->fd;
    part->fd = -1;
    return true;
}

// The first tensor that the index puts into this file is `item`: has no tensor before it been put there?
static inline bool st_index_is_new(const cJSON *map, const cJSON *item) {
    for (const cJSON *other = map->child; other != item; other = other->next) {
        if (strcmp(other->valuestring, item->valuestring) == 0) return false;
    }
    return true;
}

static inline bool st_index_read(SafeTensors *st, const char *dir, const cJSON *root, Error *err) {
    const cJSON *map, *item;
    size_t listed = 0;
    if (!json_get(root, "weight_map", &map, st->path, err)) return false;
    if (!cJSON_IsObject(map) || !map->child) return error_set(err, "%s has no \"weight_map\"", st->path);
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
        if (!st_index_is_new(map, item)) continue;
        if (!path_print(path, sizeof path, err, "%s/%s", dir, item->valuestring)) return false;
        if (access(path, F_OK) != 0) {
            return error_set(err, "%s lies: it puts tensor %s into %s, which is not there", st->path, item->string,
                             path);
        }
        if (!st_open(&part, path, err)) return false;
        bool ok = st_index_add(st, &part, map, item->valuestring, err);
        st_close(&part);
        if (!ok) return false;
    }
    qsort(st->entries, st->count, sizeof(STEntry), st_compare_names);
    cJSON_ArrayForEach(item, map) {
        const STEntry *x = st_find(st, item->string);
        if (!x || strcmp(x->name, item->string) != 0) {
            return error_set(err, "%s lies: it puts tensor %s into %s, which has it not", st->path, item->string,
                             item->valuestring);
        }
    }
    if (st->count == listed) return true;
    return error_set(err, "%s lists a tensor twice: %zu entries for %zu tensors", st->path, listed, st->count);
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
