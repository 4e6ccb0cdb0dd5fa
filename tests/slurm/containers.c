/* The options that pyxis adds to srun, for nodes without it: an image is the node itself, mounts are bind mounts that a
 * task alone sees, the working folder is entered. Built by up.sh where gcc and Slurm's headers are installed. */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

SPANK_PLUGIN(flashrl_containers, 1)

static char *mounts, *workdir;

static int ignore(int val, const char *argument, int remote) { return ESPANK_SUCCESS; }

static int keep(int val, const char *argument, int remote)
{
    *(val == 'm' ? &mounts : &workdir) = strdup(argument);
    return ESPANK_SUCCESS;
}

struct spank_option spank_options[] = {
    {"container-image", "NAME", "ignored: the node itself", 1, 'i', ignore},
    {"container-env", "NAMES", "ignored: all variables are there", 1, 'e', ignore},
    {"no-container-mount-home", NULL, "ignored", 0, 'h', ignore},
    {"container-mounts", "SOURCE:TARGET[,...]", "bind mounts", 1, 'm', keep},
    {"container-workdir", "FOLDER", "working folder", 1, 'w', keep},
    SPANK_OPTIONS_TABLE_END};

/* As root, before the task is the user's. Targets have to exist. */
int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments)
{
    if (mounts == NULL)
        return ESPANK_SUCCESS;
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        return ESPANK_ERROR;
    char *rest = strdup(mounts), *pair;
    while ((pair = strsep(&rest, ",")) != NULL) {
        char *source = strsep(&pair, ":"), *target = strsep(&pair, ":");
        if (target == NULL || mount(source, target, NULL, MS_BIND | MS_REC, NULL) != 0) {
            slurm_error("no bind mount of %s", source);
            return ESPANK_ERROR;
        }
    }
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    return workdir == NULL || chdir(workdir) == 0 ? ESPANK_SUCCESS : ESPANK_ERROR;
}
