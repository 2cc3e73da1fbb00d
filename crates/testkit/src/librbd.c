/* Plays librbd and librados for tests. Images are files below the directory that the option "stand_in" names: POOL/IMAGE,
 * with IMAGE.lock (who has the exclusive lock) and IMAGE.watchers (who has it open for writing) beside it.
 *
 * DIRECTORY/faults says what goes wrong, a line each: CALL ACTION NUMBER. Calls are read, write, zeroes, discard, flush, open,
 * connect, resize, diff. Actions are error (the number is an errno), short (one byte is missing), delay (milliseconds), hold
 * (until the line is gone) and never. When a request has been told its error, there is a file IMAGE.failed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096
#define OBJECT_BYTES 65536
#define THREADS 4

typedef void (*callback)(void *completion, void *arg);

struct cluster { char directory[PATH_BYTES]; };
struct pool { struct cluster *cluster; char path[PATH_BYTES + 512]; };
struct image { struct cluster *cluster; char path[PATH_BYTES + 1024]; int fd, writes, has_lock, in_flight; };
struct completion { callback call; void *arg; ssize_t result; };
struct request {
    struct image *image;
    struct completion *completion;
    enum { READ, WRITE, ZEROES, DISCARD, FLUSH } what;
    uint64_t offset, length;
    char *data;
    struct request *next;
};
struct watcher { char *address; int64_t id; uint64_t cookie; };
struct info { uint64_t size, object_bytes, objects; int order; char prefix[24]; int64_t parent_pool; char parent[96]; };

static const char *const NAMES[] = { "read", "write", "zeroes", "discard", "flush" };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct request *first, **last = &first;
static int has_threads;

static int fault(struct cluster *cluster, const char *call, char *action, long *number)
{
    char path[PATH_BYTES + 16], name[32];
    int found = 0;
    snprintf(path, sizeof path, "%s/faults", cluster->directory);
    FILE *file = fopen(path, "re");
    action[0] = 0;
    if (!file)
        return 0;
    while (!found && fscanf(file, "%31s %31s %ld", name, action, number) == 3)
        found = !strcmp(name, call);
    fclose(file);
    if (!found)
        action[0] = 0;
    return found;
}

/* What a call that blocks returns. */
static int outcome(struct cluster *cluster, const char *call)
{
    char action[32];
    long number;
    while (fault(cluster, call, action, &number)) {
        if (!strcmp(action, "error"))
            return -(int)number;
        if (!strcmp(action, "delay")) {
            usleep(number * 1000);
            return 0;
        }
        usleep(5000);
    }
    return 0;
}

static void own_address(char *text, size_t bytes) { snprintf(text, bytes, "127.0.0.1:0/%d", getpid()); }

static int has_line(const char *path, const char *wanted)
{
    char line[256];
    int found = 0;
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        found = !strcmp(line, wanted);
    }
    if (file)
        fclose(file);
    return found;
}

static int first_line(const char *path, char *line, size_t bytes)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    char *got = fgets(line, bytes, file);
    fclose(file);
    if (got)
        line[strcspn(line, "\n")] = 0;
    return got != NULL;
}

static void beside(struct image *image, const char *what, char *path, size_t bytes)
{
    snprintf(path, bytes, "%s.%s", image->path, what);
}

int rados_create(void **cluster, const char *id)
{
    (void)id;
    *cluster = calloc(1, sizeof(struct cluster));
    return 0;
}
int rados_conf_read_file(void *cluster, const char *path) { (void)cluster; return path && access(path, R_OK) ? -errno : 0; }
int rados_conf_set(void *cluster, const char *key, const char *value)
{
    if (!strcmp(key, "stand_in"))
        snprintf(((struct cluster *)cluster)->directory, PATH_BYTES, "%s", value);
    return !strcmp(key, "unknown") ? -ENOENT : 0;
}
int rados_conf_get(void *cluster, const char *key, char *value, size_t bytes)
{
    (void)cluster, (void)key;
    snprintf(value, bytes, "300");
    return 0;
}
int rados_connect(void *cluster) { return outcome(cluster, "connect"); }
void rados_shutdown(void *cluster) { free(cluster); }
int rados_ioctx_create(void *cluster, const char *name, void **made)
{
    struct pool *pool = calloc(1, sizeof *pool);
    pool->cluster = cluster;
    snprintf(pool->path, sizeof pool->path, "%s/%s", pool->cluster->directory, name);
    if (access(pool->path, F_OK)) {
        free(pool);
        return -ENOENT;
    }
    *made = pool;
    return 0;
}
void rados_ioctx_set_namespace(void *pool, const char *name) { (void)pool, (void)name; }
void rados_ioctx_destroy(void *pool) { free(pool); }

void rbd_version(int *major, int *minor, int *extra) { *major = 0, *minor = 0, *extra = 0; }
int rbd_create(void *pool, const char *name, uint64_t size, int *order)
{
    char path[PATH_BYTES + 1024];
    snprintf(path, sizeof path, "%s/%s", ((struct pool *)pool)->path, name);
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int result = ftruncate(fd, size) ? -errno : 0;
    close(fd);
    *order = 16;
    return result;
}
int rbd_remove(void *pool, const char *name)
{
    char path[PATH_BYTES + 1024], watchers[PATH_BYTES + 1100], line[256];
    snprintf(path, sizeof path, "%s/%s", ((struct pool *)pool)->path, name);
    snprintf(watchers, sizeof watchers, "%s.watchers", path);
    if (first_line(watchers, line, sizeof line))
        return -EBUSY;
    return unlink(path) ? -errno : 0;
}

static int open_image(struct pool *pool, const char *name, void **made, const char *snapshot, int writes)
{
    int result = outcome(pool->cluster, "open");
    if (result < 0)
        return result;
    struct image *image = calloc(1, sizeof *image);
    image->cluster = pool->cluster;
    image->writes = writes;
    snprintf(image->path, sizeof image->path, "%s/%s%s%s", pool->path, name, snapshot ? "@" : "", snapshot ? snapshot : "");
    image->fd = open(image->path, (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (image->fd < 0) {
        result = -errno;
        free(image);
        return result;
    }
    if (writes) {
        char path[PATH_BYTES + 1100], own[64];
        beside(image, "watchers", path, sizeof path);
        own_address(own, sizeof own);
        FILE *file = fopen(path, "ae");
        fprintf(file, "%s\n", own);
        fclose(file);
    }
    *made = image;
    return 0;
}
int rbd_open(void *pool, const char *name, void **image, const char *snapshot) { return open_image(pool, name, image, snapshot, 1); }
int rbd_open_read_only(void *pool, const char *name, void **image, const char *snapshot) { return open_image(pool, name, image, snapshot, 0); }

int rbd_close(void *handle)
{
    struct image *image = handle;
    char path[PATH_BYTES + 1100], own[64], line[256], rest[4096] = "";
    pthread_mutex_lock(&lock);
    while (image->in_flight)
        pthread_cond_wait(&changed, &lock);
    own_address(own, sizeof own);
    if (image->has_lock) {
        beside(image, "lock", path, sizeof path);
        unlink(path);
    }
    if (image->writes) {
        int skipped = 0;
        beside(image, "watchers", path, sizeof path);
        FILE *file = fopen(path, "re");
        while (file && fgets(line, sizeof line, file)) {
            int is_own = !strncmp(line, own, strlen(own)) && line[strlen(own)] == '\n';
            if (is_own && !skipped)
                skipped = 1;
            else
                strncat(rest, line, sizeof rest - strlen(rest) - 1);
        }
        if (file)
            fclose(file);
        file = fopen(path, "we");
        if (file) {
            fputs(rest, file);
            fclose(file);
        }
    }
    pthread_mutex_unlock(&lock);
    close(image->fd);
    free(image);
    return 0;
}

static uint64_t size_of(struct image *image)
{
    struct stat stat;
    return fstat(image->fd, &stat) ? 0 : stat.st_size;
}
int rbd_stat(void *image, struct info *info, size_t bytes)
{
    memset(info, 0, bytes);
    info->size = size_of(image);
    info->object_bytes = OBJECT_BYTES;
    info->order = 16;
    return 0;
}
int rbd_resize(void *handle, uint64_t size)
{
    struct image *image = handle;
    int result = outcome(image->cluster, "resize");
    return result < 0 ? result : ftruncate(image->fd, size) ? -errno : 0;
}
int rbd_get_features(void *handle, uint64_t *features)
{
    char action[32];
    long number = 0;
    int lacks_lock = fault(((struct image *)handle)->cluster, "features", action, &number);
    *features = lacks_lock ? number : 1 | 4 | 8 | 16;
    return 0;
}
int rbd_get_flags(void *image, uint64_t *flags) { (void)image; *flags = 0; return 0; }
int rbd_get_overlap(void *image, uint64_t *overlap) { (void)image; *overlap = 0; return 0; }

int rbd_lock_acquire(void *handle, int mode)
{
    struct image *image = handle;
    char path[PATH_BYTES + 1100], watchers[PATH_BYTES + 1100], own[64], owner[256];
    (void)mode;
    own_address(own, sizeof own);
    beside(image, "lock", path, sizeof path);
    beside(image, "watchers", watchers, sizeof watchers);
    if (first_line(path, owner, sizeof owner) && strcmp(owner, own) && has_line(watchers, owner))
        return -EROFS;
    FILE *file = fopen(path, "we");
    if (!file)
        return -errno;
    fprintf(file, "%s\n", own);
    fclose(file);
    image->has_lock = 1;
    return 0;
}
int rbd_lock_get_owners(void *handle, int *mode, char **owners, size_t *count)
{
    char path[PATH_BYTES + 1100], owner[256];
    beside(handle, "lock", path, sizeof path);
    if (!first_line(path, owner, sizeof owner))
        return -ENOENT;
    *mode = 0, *count = 1, owners[0] = strdup(owner);
    return 0;
}
void rbd_lock_get_owners_cleanup(char **owners, size_t count)
{
    while (count--)
        free(owners[count]);
}
int rbd_watchers_list(void *handle, struct watcher *watchers, size_t *count)
{
    char path[PATH_BYTES + 1100], line[256];
    size_t found = 0;
    beside(handle, "watchers", path, sizeof path);
    FILE *file = fopen(path, "re");
    while (file && found < *count && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        watchers[found++].address = strdup(line);
    }
    if (file)
        fclose(file);
    *count = found;
    return 0;
}
void rbd_watchers_list_cleanup(struct watcher *watchers, size_t count)
{
    while (count--)
        free(watchers[count].address);
}

int rbd_diff_iterate2(void *handle, const char *from, uint64_t offset, uint64_t length, uint8_t parent, uint8_t whole,
                      int (*found)(uint64_t, size_t, int, void *), void *arg)
{
    struct image *image = handle;
    int result = outcome(image->cluster, "diff");
    uint64_t end = offset + length;
    (void)from, (void)parent;
    while (result >= 0 && offset < end) {
        off_t data = lseek(image->fd, offset, SEEK_DATA);
        if (data < 0 || (uint64_t)data >= end)
            break;
        off_t hole = lseek(image->fd, data, SEEK_HOLE);
        uint64_t start = data, stop = hole;
        if (whole) {
            start = start / OBJECT_BYTES * OBJECT_BYTES;
            stop = (stop + OBJECT_BYTES - 1) / OBJECT_BYTES * OBJECT_BYTES;
        }
        start = start < offset ? offset : start;
        stop = stop > end ? end : stop;
        result = found(start, stop - start, 1, arg);
        offset = stop;
    }
    return result;
}

static ssize_t move_bytes(struct request *request)
{
    int fd = request->image->fd;
    uint64_t size = size_of(request->image), done = 0;
    if (request->what == READ && request->offset + request->length > size)
        request->length = request->offset < size ? size - request->offset : 0;
    else if (request->what != FLUSH && request->offset + request->length > size)
        return -EINVAL;
    if (request->what == DISCARD || request->what == ZEROES) {
        int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        return request->length && fallocate(fd, mode, request->offset, request->length) ? -errno : 0;
    }
    while (request->what != FLUSH && done < request->length) {
        uint64_t at = request->offset + done, left = request->length - done;
        ssize_t moved = request->what == READ ? pread(fd, request->data + done, left, at)
                                              : pwrite(fd, request->data + done, left, at);
        if (moved <= 0)
            return moved < 0 ? -errno : -EIO;
        done += moved;
    }
    return request->what == READ ? (ssize_t)done : 0;
}

static void serve(struct request *request)
{
    struct image *image = request->image;
    struct completion *completion = request->completion;
    char action[32] = "";
    long number = 0;
    ssize_t result = 0;
    while (fault(image->cluster, NAMES[request->what], action, &number) && !strcmp(action, "hold"))
        usleep(5000);
    if (!strcmp(action, "never"))
        return;
    if (!strcmp(action, "delay"))
        usleep(number * 1000);
    result = !strcmp(action, "error") ? -number : move_bytes(request);
    if (!strcmp(action, "short") && result > 0)
        result--;
    free(request);
    completion->result = result;
    completion->call(completion, completion->arg);
    if (!strcmp(action, "error")) {
        char path[sizeof image->path + 16];
        snprintf(path, sizeof path, "%s.failed", image->path);
        close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    }
    pthread_mutex_lock(&lock);
    image->in_flight--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void *work(void *arg)
{
    (void)arg;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!first)
            pthread_cond_wait(&changed, &lock);
        struct request *request = first;
        first = request->next;
        if (!first)
            last = &first;
        pthread_mutex_unlock(&lock);
        serve(request);
    }
    return NULL;
}

static int push(void *image, int what, uint64_t offset, uint64_t length, const char *data, void *completion)
{
    struct request *request = calloc(1, sizeof *request);
    *request = (struct request){ image, completion, what, offset, length, (char *)data, NULL };
    pthread_mutex_lock(&lock);
    request->image->in_flight++;
    *last = request;
    last = &request->next;
    pthread_t thread;
    while (has_threads < THREADS && !pthread_create(&thread, NULL, work, NULL)) {
        pthread_detach(thread);
        has_threads++;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

int rbd_aio_create_completion(void *arg, callback call, void **made)
{
    struct completion *completion = calloc(1, sizeof *completion);
    completion->call = call, completion->arg = arg;
    *made = completion;
    return 0;
}
ssize_t rbd_aio_get_return_value(void *completion) { return ((struct completion *)completion)->result; }
void rbd_aio_release(void *completion) { free(completion); }
int rbd_aio_read(void *image, uint64_t offset, size_t length, char *data, void *completion) { return push(image, READ, offset, length, data, completion); }
int rbd_aio_write(void *image, uint64_t offset, size_t length, const char *data, void *completion) { return push(image, WRITE, offset, length, data, completion); }
int rbd_aio_discard(void *image, uint64_t offset, uint64_t length, void *completion) { return push(image, DISCARD, offset, length, NULL, completion); }
int rbd_aio_write_zeroes(void *image, uint64_t offset, size_t length, void *completion, int zero_flags, int op_flags)
{
    (void)zero_flags, (void)op_flags;
    return push(image, ZEROES, offset, length, NULL, completion);
}
int rbd_aio_flush(void *image, void *completion) { return push(image, FLUSH, 0, 0, NULL, completion); }
