/*
 * An SQLite VFS (https://sqlite.org/vfs.html) that writes the log in one piece.
 *
 * SQLite writes its log page by page, and each page as a header of 24 bytes and a body: two system calls for 4 KiB, and
 * hundreds for a group of commits. This VFS passes every call on to the default VFS, but buffers consecutive writes to
 * a log and passes them on together. The difference is not observable. The buffer is flushed
 *
 *   - before a sync; if the flush fails, the sync fails;
 *   - before the log is read, measured, truncated or closed through this file;
 *   - before other connections learn of new pages (the shared-memory barrier), so that they find the pages in the file
 *     even if nothing is synced;
 *   - before a lock is taken or released, so that nothing is unwritten when another connection may write.
 *
 * A failed write fails its transaction and nothing else. Until that transaction has released the write lock, every
 * further use of the log fails the same way, so it cannot commit; whatever it left in the file lies behind the last
 * commit, where it is never read, and the next transaction overwrites it. This requires `synchronous=FULL`, which the
 * store uses: only then is the log synced, and a failure reported, before a commit becomes visible to others.
 *
 * SQLite recognises a full disk by ENOSPC alone. This VFS also reports an exhausted quota (EDQUOT) and the file size
 * limit (EFBIG) as a full disk.
 *
 * It needs no locks: SQLite uses a file from one thread at a time.
 */

#include <errno.h>
#include <string.h>

#include <sqlite3.h>

/* The size of the buffer: 31 pages with their headers. The default VFS takes less than 128 KiB at a time. */
#define MOST_BYTES (127 << 10)

/* The index of the write lock among the shared-memory locks (https://sqlite.org/walformat.html). */
#define WRITE_LOCK 0

typedef struct Gathered Gathered;

struct Gathered {
    /* Must come first: SQLite uses a pointer to this struct as its file object. */
    sqlite3_file base;
    /* The file of the default VFS, allocated right behind this struct. */
    sqlite3_file *file;
    /* Of a database: its log, while that is open. Of a log: its database. NULL otherwise. */
    Gathered *other;
    int is_log;
    /* The error of a failed write, until the end of its transaction. */
    int failed;
    /* The buffered bytes, their number and their offset in the file. */
    char *buffer;
    int length;
    sqlite3_int64 at;
};

static Gathered *gathered(sqlite3_file *base) {
    return (Gathered *)base;
}

/* Writes through the default VFS. */
static int pass_on(Gathered *self, const void *bytes, int count, sqlite3_int64 at) {
    int result = self->file->pMethods->xWrite(self->file, bytes, count, at);
    int why = 0;
    if (result != SQLITE_IOERR_WRITE) return result;
    self->file->pMethods->xFileControl(self->file, SQLITE_FCNTL_LAST_ERRNO, &why);
    return why == EDQUOT || why == EFBIG ? SQLITE_FULL : result;
}

/* Flushes the buffer. If that fails the buffer is dropped: the caller rolls back the transaction. */
static int release(Gathered *self) {
    int length = self->length;
    if (self->failed != SQLITE_OK) return self->failed;
    if (length == 0) return SQLITE_OK;
    self->length = 0;
    self->failed = pass_on(self, self->buffer, length, self->at);
    return self->failed;
}

static int gather_write(sqlite3_file *base, const void *bytes, int count, sqlite3_int64 at) {
    Gathered *self = gathered(base);
    if (self->is_log) {
        int follows = at == self->at + self->length && count <= MOST_BYTES - self->length;
        if (!follows || self->failed != SQLITE_OK) {
            int result = release(self);
            if (result != SQLITE_OK) return result;
        }
        if (self->buffer == NULL) self->buffer = sqlite3_malloc(MOST_BYTES);
        if (self->buffer != NULL && count <= MOST_BYTES - self->length) {
            if (self->length == 0) self->at = at;
            memcpy(self->buffer + self->length, bytes, (size_t)count);
            self->length += count;
            return SQLITE_OK;
        }
    }
    return pass_on(self, bytes, count, at);
}

static int gather_sync(sqlite3_file *base, int flags) {
    Gathered *self = gathered(base);
    int result = release(self);
    return result != SQLITE_OK ? result : self->file->pMethods->xSync(self->file, flags);
}

static int gather_read(sqlite3_file *base, void *bytes, int count, sqlite3_int64 at) {
    Gathered *self = gathered(base);
    int result = release(self);
    return result != SQLITE_OK ? result : self->file->pMethods->xRead(self->file, bytes, count, at);
}

static int gather_size(sqlite3_file *base, sqlite3_int64 *size) {
    Gathered *self = gathered(base);
    int result = release(self);
    return result != SQLITE_OK ? result : self->file->pMethods->xFileSize(self->file, size);
}

static int gather_truncate(sqlite3_file *base, sqlite3_int64 size) {
    Gathered *self = gathered(base);
    int result = release(self);
    return result != SQLITE_OK ? result : self->file->pMethods->xTruncate(self->file, size);
}

static int gather_control(sqlite3_file *base, int op, void *argument) {
    Gathered *self = gathered(base);
    int result = release(self);
    return result != SQLITE_OK ? result : self->file->pMethods->xFileControl(self->file, op, argument);
}

static int gather_close(sqlite3_file *base) {
    Gathered *self = gathered(base);
    int written = release(self);
    int closed = self->file->pMethods->xClose(self->file);
    if (self->other != NULL) self->other->other = NULL;
    sqlite3_free(self->buffer);
    return written != SQLITE_OK ? written : closed;
}

/* Flushes the log of a database, before other connections may read or write it. */
static void share(Gathered *self) {
    if (self->other != NULL) release(self->other);
}

static void gather_shm_barrier(sqlite3_file *base) {
    Gathered *self = gathered(base);
    share(self);
    self->file->pMethods->xShmBarrier(self->file);
}

static int gather_shm_lock(sqlite3_file *base, int offset, int count, int flags) {
    Gathered *self = gathered(base);
    int ends = offset == WRITE_LOCK && (flags & SQLITE_SHM_UNLOCK) && (flags & SQLITE_SHM_EXCLUSIVE);
    share(self);
    /* The transaction is over. If a write of it failed, it was rolled back. */
    if (ends && self->other != NULL) self->other->failed = SQLITE_OK;
    return self->file->pMethods->xShmLock(self->file, offset, count, flags);
}

/* The following calls are passed on unchanged. */

static int gather_lock(sqlite3_file *base, int lock) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xLock(file, lock);
}

static int gather_unlock(sqlite3_file *base, int lock) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xUnlock(file, lock);
}

static int gather_is_reserved(sqlite3_file *base, int *answer) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xCheckReservedLock(file, answer);
}

static int gather_sector(sqlite3_file *base) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xSectorSize(file);
}

static int gather_device(sqlite3_file *base) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xDeviceCharacteristics(file);
}

static int gather_shm_map(sqlite3_file *base, int page, int size, int extend, void volatile **memory) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xShmMap(file, page, size, extend, memory);
}

static int gather_shm_unmap(sqlite3_file *base, int remove) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xShmUnmap(file, remove);
}

static int gather_fetch(sqlite3_file *base, sqlite3_int64 at, int count, void **memory) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xFetch(file, at, count, memory);
}

static int gather_unfetch(sqlite3_file *base, sqlite3_int64 at, void *memory) {
    sqlite3_file *file = gathered(base)->file;
    return file->pMethods->xUnfetch(file, at, memory);
}

static const sqlite3_io_methods methods = {
    .iVersion = 3,
    .xClose = gather_close,
    .xRead = gather_read,
    .xWrite = gather_write,
    .xTruncate = gather_truncate,
    .xSync = gather_sync,
    .xFileSize = gather_size,
    .xLock = gather_lock,
    .xUnlock = gather_unlock,
    .xCheckReservedLock = gather_is_reserved,
    .xFileControl = gather_control,
    .xSectorSize = gather_sector,
    .xDeviceCharacteristics = gather_device,
    .xShmMap = gather_shm_map,
    .xShmLock = gather_shm_lock,
    .xShmBarrier = gather_shm_barrier,
    .xShmUnmap = gather_shm_unmap,
    .xFetch = gather_fetch,
    .xUnfetch = gather_unfetch,
};

static int gather_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *base, int flags, int *opened) {
    sqlite3_vfs *usual = vfs->pAppData;
    Gathered *self = gathered(base);
    int result;
    memset(self, 0, sizeof *self);
    self->file = (sqlite3_file *)(self + 1);
    self->file->pMethods = NULL;
    result = usual->xOpen(usual, name, self->file, flags, opened);
    if (self->file->pMethods == NULL) return result;
    /* A file without shared memory cannot have a log. */
    if (result == SQLITE_OK && self->file->pMethods->iVersion < 3) result = SQLITE_CANTOPEN;
    if (result != SQLITE_OK) {
        self->file->pMethods->xClose(self->file);
        return result;
    }
    base->pMethods = &methods;
    if (flags & SQLITE_OPEN_WAL) {
        self->is_log = 1;
        self->other = gathered(sqlite3_database_file_object(name));
        self->other->other = self;
    }
    return SQLITE_OK;
}

/*
 * Registers the VFS by name when the program starts; it is not the default. Only xOpen differs from the default VFS,
 * whose other functions do not use their vfs argument.
 */
__attribute__((constructor)) static void eddyline_gather(void) {
    static sqlite3_vfs gathering;
    sqlite3_vfs *usual = sqlite3_vfs_find(NULL);
    if (usual == NULL || usual->iVersion < 3) return;
    gathering = *usual;
    gathering.pNext = NULL;
    gathering.zName = "eddyline-gather";
    gathering.pAppData = usual;
    gathering.szOsFile = (int)sizeof(Gathered) + usual->szOsFile;
    gathering.xOpen = gather_open;
    sqlite3_vfs_register(&gathering, 0);
}
