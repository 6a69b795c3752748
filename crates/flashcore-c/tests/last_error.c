/* flashcore_last_error(): one buffer for each thread, which no call moves or frees. */

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "flashcore.h"

#define REQUIRE(condition)                                                                  \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            printf("line %d: %s: %s\n", __LINE__, #condition, flashcore_last_error());      \
            return 1;                                                                       \
        }                                                                                   \
    } while (0)

static int refused(const char *config)
{
    flashcore_attention_problem_t problem;
    flashcore_plan_t *plan;
    flashcore_attention_problem_init(&problem, 1, 1, 16, 64, FLASHCORE_DTYPE_F16);
    return flashcore_plan_create(&problem.base, FLASHCORE_DEVICE_CPU, 0, config, &plan);
}

static void *elsewhere(void *seen)
{
    *(const char **)seen = flashcore_last_error();
    refused("elsewhere");
    return NULL;
}

int main(void)
{
    /* The text is read after a later call, as arguments of one printf() may be. */
    refused("first");
    const char *text = flashcore_last_error();
    REQUIRE(strncmp(text, "there is no kernel `first`;", 27) == 0);
    REQUIRE(refused("second") == FLASHCORE_INVALID_ARGUMENT);
    REQUIRE(strncmp(text, "there is no kernel `second`;", 28) == 0);
    flashcore_attention_problem_t problem;
    REQUIRE(flashcore_attention_problem_init(&problem, 1, 1, 16, 64, FLASHCORE_DTYPE_F16) == FLASHCORE_OK);
    REQUIRE(*text == 0 && flashcore_last_error() == text);

    /* A long text is cut between two characters: 20 bytes, 1357 times 3, and the dots; one more byte there is room for. */
    char name[6001] = "";
    for (int place = 0; place < 6000; place += 3)
        memcpy(name + place, "\xE2\x82\xAC", 3);
    REQUIRE(refused(name) == FLASHCORE_INVALID_ARGUMENT);
    REQUIRE(strlen(text) == 4094);
    REQUIRE(strcmp(text + 4094 - 6, "\xE2\x82\xAC...") == 0);

    /* Another thread has a text of its own. */
    refused("here");
    const char *other = NULL;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, elsewhere, &other) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    REQUIRE(other != text && strncmp(text, "there is no kernel `here`;", 26) == 0);
    printf("%d %.26s\n", refused("last"), flashcore_last_error());
    return 0;
}
